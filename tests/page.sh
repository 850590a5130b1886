#!/usr/bin/env bash
# page.sh FOLDER: whether the pages of examples/estimate and bench/timeline work in a browser, Chromium
# without a window: scripts run without an error, and where the pointer is, the page says what is there.
# FOLDER is where the programs are (build, build/quick), and pages are written. Status 77: no browser.
set -u
cd "$(dirname "$0")/.."
folder=${1:-build}

for browser in chromium chromium-browser google-chrome none; do
    ! command -v $browser > /dev/null || break
done
[ $browser != none ] || { echo 'no chromium'; exit 77; }

# What is on the page once its scripts have run; their errors too.
dump() { # PAGE FRAGMENT
    timeout 100 $browser --headless --no-sandbox --disable-gpu --window-size=1280,1100 --enable-logging=stderr \
        --virtual-time-budget=2000 --dump-dom "file://$PWD/$1#$2" 2> "$1.log"
    ! grep -E 'CONSOLE|Uncaught' "$1.log"
}

status=0
expect() { # PAGE FRAGMENT TEXT...: the page has these texts
    local dom text
    dom=$(dump "$1" "$2") || { echo "$1#$2: an error"; status=1; }
    dom=$(sed '/<script/,/<\/script>/d' <<< "$dom") # not the data
    for text in "${@:3}"; do
        [[ $dom == *"$text"* ]] || { echo "$1#$2 has no \"$text\""; status=1; }
    done
}

page=$folder/page.html
$folder/examples/estimate --family gpt2 --layers 4 --channels 256 --heads 4 --vocabulary 512 --batch 32 \
    --sequence 256 --gpu 3090 --budget 250M --html $page > /dev/null 2>&1 || exit 1
expect $page '' '<h1 id="title">gpt2 of your own, batch 32 x 256 tokens' '<b>BALANCED</b>' \
    'arena: all that training takes' 'Applied to layers, of '
expect $page 'plan=1&hover=400,440' 'Why: decided for layer h' '>activations, f32<' '<br>through #' 'alive for '
expect $page 'plan=1&hover=400,570' '>stream</td><td class="n">compute</td>' 'Why: decided for layer h'
expect $page 'hover=400,900' '<td>budget</td>' '<td>step over plain</td>' # the curves
expect $page 'plan=0&hover=10,10' '<h2>plain</h2>'

page=$folder/timeline.html
$folder/bench/timeline --model bert-base --budget 50% --html $page > /dev/null || exit 1
expect $page '' '<b>plain</b>' '<b>planned</b>' 'bert-base, 16 x 128 tokens'
expect $page 'plan=0&hover=500,470' 'Lives between steps, on the device.' 'The largest of '
exit $status
