#!/usr/bin/env bash
# figures.sh FOLDER: whether the figures of README.md and docs/ are those that the programs of this
# version print. FOLDER is where the programs are (build, build/quick). Only predictions are checked,
# which are the same on every machine; times that were measured stand in bench/results.
#
# A transcript, a block that begins with "    $ COMMAND", must be what the command prints. A row of a
# table must stand in its document as it is made here. Prints what differs, as it should read.
set -u
cd "$(dirname "$0")/.."
folder=${1:-build}
status=0

stale() { # DOCUMENT TEXT
    printf '%s should read:\n%s\n' "$1" "$2"
    status=1
}

# ---- transcripts ---------------------------------------------------------------------------------

# The block of a document that begins at a line, up to the next line that is not indented.
block() { # DOCUMENT LINE
    tail -n +"$2" "$1" | awk '/^[^ ]/ { exit } { sub(/^    /, ""); print }' | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'
}

while IFS=: read -r document line command; do
    command=${command#"    $ "}
    expected="\$ $command"$'\n'$(${command/build/$folder} 2>&1)
    [ "$expected" = "$(block "$document" "$line")" ] || stale "$document" "$(sed 's/^\(.\)/    \1/' <<< "$expected")"
done < <(grep -Hn '^    \$ build/' README.md docs/*.md)

# An error as a document quotes it, in lines of its own.
said=$($folder/examples/gpt2 --preset 124M --batch 4 --sequence 1024 --precision f32 --dry --budget 2G 2>&1 > /dev/null)
[[ $(tr -s ' \n' ' ' < docs/decision-engine.md) == *"${said#gpt2: }"* ]] || stale docs/decision-engine.md "${said#gpt2: }"

# ---- rows of tables ------------------------------------------------------------------------------

row() { # DOCUMENT ROW
    grep -qxF -- "$2" "$1" || stale "$1" "$2"
}

rows() { # DOCUMENT: rows from standard input
    while IFS= read -r line; do
        row "$1" "$line"
    done
}

# MB, with commas between thousands, as in 24,938
mega='function mb(bytes, text) {
    text = sprintf("%.0f", bytes / 1e6)
    return length(text) > 3 ? substr(text, 1, length(text) - 3) "," substr(text, length(text) - 2) : text
}
BEGIN {
    split("BERT-Base 16x128,BERT-Large 16x128,GPT-2 Medium 4x512,GPT-2 Large 2x512,GPT-2 XL 1x512", titles, ",")
    FS = "\t"
}
NR > 1 { title = titles[NR - 1] }'

workloads=$($folder/bench/workloads --tsv)
awk "$mega"'
NR > 1 {
    plain = plain " | " mb($3); smallest = smallest " | " mb($4)
    moved = moved " | " mb($9); host = host " | " mb($10)
}
END {
    print "| plain" plain " |"; print "| smallest, without offloading" smallest " |"
    print "| smallest, with it" moved " |"; print "| on the host then" host " |"
}' <<< "$workloads" | rows docs/offloading.md
awk "$mega"'
NR > 1 {
    params = sprintf("%.1f", $2 / 1e6)
    if ($2 >= 1e9) { params = substr(params, 1, 1) "," substr(params, 2) }
    printf "| %s | %s M | %s MB | %s MB | %.2f | %s -> %s MB | %s, %s MB | %.0f %% |\n", title, params, mb($3),
        mb($4), $3 / $4, mb($6), mb($7), mb(16 * $2), mb(12 * $2), 100 * $8
}' <<< "$workloads" | rows docs/memory-budget.md
# Published plain -> optimized, plain, the smallest arena of each mode, and the throughput of AGGRESSIVE at the
# published peak over that of the plain F32 step.
awk "$mega"'
NR > 1 {
    split("3140 7600 10870 14870 0", published, " ")
    before = published[NR - 1] > 0 ? mb(1e6 * published[NR - 1]) : "none"
    printf "| %s | %s -> %s MB | %s MB | %s MB | %s MB | %s MB | %.2f |\n", title, before, mb($11), mb($3), mb($4), mb($9),
        mb($14), 1 / $17
}' <<< "$workloads" | rows README.md

# What examples/gpt2 prints of a dry run, by the first word of a line: plain, smallest, arena; in MiB
mebi() { # WORD TEXT
    awk -v word="$1" '$1 == word { printf "%.0f", $2 }' <<< "$2"
}

gpt2() { # ARGUMENTS
    $folder/examples/gpt2 --dry "$@" 2>&1
}

for budget in 4698 4096 3072 2560; do
    text=$(gpt2 --preset 124M --batch 4 --sequence 1024 --budget ${budget}M)
    row docs/decision-engine.md "| $budget MiB | $(awk -v b=$budget '
        $1 == "plain" { plain = $2 } $1 == "arena" { arena = $2 }
        $1 == "decided" { split($0, part, "take "); step = part[2] + 0; split($0, part, "plain one "); one = part[2] + 0 }
        END { printf "%.2f | %.0f MiB | %.3f", plain / b, arena, step / one }' <<< "$text") |"
done

while read -r title preset batch sequence; do
    both=$(gpt2 --preset $preset --batch $batch --sequence $sequence)
    updates=$(gpt2 --preset $preset --batch $batch --sequence $sequence --off checkpointing)
    drops=$(gpt2 --preset $preset --batch $batch --sequence $sequence --off early-update)
    row docs/techniques.md "| $title M params, $batch x $sequence tokens | $(mebi plain "$both") MiB | $(
        mebi smallest "$both") MiB | $(mebi smallest "$updates") MiB | $(mebi smallest "$drops") MiB |"
done << 'END'
124 124M 4 1024
355 355M 4 512
1558 1558M 1 512
END

# ---- sentences -----------------------------------------------------------------------------------

sentence() { # DOCUMENT TEXT: line ends count as spaces
    [[ $(tr -s ' \n' ' ' < "$1") == *"$2"* ]] || stale "$1" "$2"
}

# What examples/estimate says of these arguments, which several figures are from.
said_of=$(mktemp -d)
trap 'rm -r "$said_of"' EXIT
estimate() { # ARGUMENTS
    local said="$said_of/${*//[^A-Za-z0-9]/_}"
    [ -f "$said" ] || $folder/examples/estimate --json "$@" > "$said"
    cat "$said"
}

# A number of the plain plan, or of the first mode's plan for the budget or smallest plan.
estimated() { # PLAN KEY ARGUMENTS
    local plan=$1 key=$2
    shift 2
    estimate "$@" | awk -v plan="\"$plan\": {" -v key="\"$key\":" '
        index($0, plan) { inside = 1 }
        inside && !found && index($0, key) { gsub(/.*: |,$/, ""); print; found = 1 }'
}

xl='--model gpt2-1558M --batch 1 --sequence 512'
sentence README.md "the smallest plan of XL is predicted to take $(
    printf %.2f "$(estimated smallest step_over_plain $xl --gpu H200)") times the plain step"

gibi() { # ARGUMENTS: the smallest plan, rounded up
    estimated smallest peak_bytes "$@" | awk '{ g = 100 * $1 / 2 ^ 30; printf "%.2f", (int(g) + (int(g) < g)) / 100 }'
}
sentence docs/memory-budget.md "at least $(gibi $xl --gpu 3090) GiB with early updates, $(
    gibi $xl --gpu 3090 --clip 1) with clipping, $(gibi $xl --gpu 3090 --accumulate 4) with accumulation"

half() { # ARGUMENTS: the step over the plain one, at a budget half way between smallest and plain
    local smallest=$(estimated smallest peak_bytes "$@" --gpu H200)
    local plain=$(estimated plain peak_bytes "$@" --gpu H200)
    estimated at_budget step_over_plain "$@" --gpu H200 --budget $(((smallest + plain) / 2))
}
sentence docs/memory-budget.md "is predicted to take $(
    { half --model bert-base --batch 16 --sequence 128; half --model bert-large --batch 16 --sequence 128
      half --model gpt2-355M --batch 4; half --model gpt2-774M --batch 2; } | sort -n |
        awk 'NR == 1 { printf "%.2f", $1 } { last = $1 } END { printf " to %.2f", last }') times the plain one on an H200, and $(
    printf %.2f "$(half $xl)") for XL"

exit $status
