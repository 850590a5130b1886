#!/usr/bin/env bash
# source.sh CHECK: what the text of memscale.h keeps to. Each check is a function check_CHECK below; most
# of them plant what they look for in a copy first, to see that they find it.
set -u
cd "$(dirname "$0")/.."
checks=$(mktemp -d)
trap 'rm -rf $checks' EXIT

compile() { # SOURCES: as the house compiles, without code
    ${CC:-cc} -std=c99 ${WARNINGS_C-} ${WARNINGS--Wall} -Werror -I. -fsyntax-only -x c "$@"
}

# A function calls only what is defined above it. Prints where a header names a function, public or
# private, whose definition comes later, and where it declares a private function without a body. A
# macro names what its text names.
misplaced() { # HEADER
    awk '
        /^#endif \/\/ MEMSCALE_H/ { inside = 1; next }
        !inside { next }
        {
            if (comment && !sub(/^.*\*\//, "")) { next }
            comment = 0
            gsub(/"([^"\\]|\\.)*"/, "0")
            gsub(/\047([^\047\\]|\\.)\047/, "0")
            gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, " ")
            sub(/\/\/.*/, "")
            comment = sub(/\/\*.*/, "")
            directive = continued || /^#/
            continued = directive && /\\$/
            gsub(/[^A-Za-z0-9_.>(){};]/, " ")
            gsub(/[.>(){};]/, " & ")
            count = split($0, words, " ")
            for (i = 1; i <= count; i++) { word(words[i]) }
        }
        function word(w) {
            if (w ~ /^msi?_[a-z0-9_]+$/ && last != "." && last != ">" && last != "struct") {
                uses[++used] = w
                line[used] = NR
                if (!directive && !braces && !parens) { name = w; begins = NR }
            }
            last = w
            if (directive) { return }
            if (w == ";" && ends && name ~ /^msi_/) { print "line " NR " declares " name " without a body" }
            if (w == "{" && ends && !(name in defined)) { defined[name] = begins }
            if (w == "{") { braces++ }
            if (w == "}") { braces-- }
            if (w == "(") { parens++ }
            if (w == ")") { parens-- }
            ends = w == ")" && !parens && !braces && name != "" # of the parameters of a function
            if (!braces && (w == ";" || w == "}")) { name = "" }
        }
        END {
            for (i = 1; i <= used; i++) {
                if (uses[i] in defined && line[i] < defined[uses[i]]) {
                    print "line " line[i] " names " uses[i] ", which line " defined[uses[i]] " defines"
                }
            }
        }' "$1"
}

# A copy of the header with a line after the one that has PATTERN.
plant() { # PATTERN LINE: the path of the copy
    local copy
    copy=$(mktemp $checks/planted.XXXXXX)
    awk -v pattern="$1" -v line="$2" '{ print } !done && index($0, pattern) { print line; done = 1 }
        END { exit !done }' memscale.h > "$copy" && echo "$copy"
}

# Of planted copies, so that it is seen to find what it looks for: a call, an address, a macro, a
# declaration.
check_order() {
    local line copy
    for line in 'static void msi_planted(void) { ms_destroy(NULL); }' \
        'static void (*const msi_planted)(ms_model *) = &msi_free_model;' \
        '#define MSI_PLANTED(m) msi_free_model(m)' 'static void msi_free_model(ms_model *m);'; do
        copy=$(plant '// >>names' "$line") || return 1
        [ -n "$(misplaced "$copy")" ] || { echo "not found: $line"; return 1; }
    done
    ! misplaced memscale.h | grep .
}

# Where the sections of a header do not agree with its table of contents, and which is longer than a
# room may be.
rooms() { # HEADER
    awk -v most=1300 '
        function ends() { if (tag && NR - begins > most) { print tag " has " NR - begins " lines" } }
        /TABLE OF CONTENTS/ { inside = 1 }
        /^\*\// { inside = 0 }
        inside { while (match($0, />>(backend |cuda |cpu )?[a-z]+/)) {
            listed[substr($0, RSTART, RLENGTH)] = 1; $0 = substr($0, RSTART + RLENGTH) } }
        /^\/\/ >>/ { ends(); match($0, />>(backend |cuda |cpu )?[a-z]+/); tag = substr($0, RSTART, RLENGTH)
            begins = NR; if (!(tag in listed)) { print tag " is not listed" } delete listed[tag] }
        END { ends(); for (tag in listed) { print tag " is listed" } }' "$1"
}

check_rooms() {
    local copy
    copy=$(plant '// >>names' '// >>planted  a room') && [ -n "$(rooms "$copy")" ] || return 1
    ! rooms memscale.h | grep .
}

# A switch over an enum of ours lists its cases, so that the compiler names one that is missing.
defaults() { # HEADER
    awk '/^\/\/ >>/ { section = $2 } /^ *default:/ { print "line " NR ", " section ": " $0 }' "$1"
}

check_switches() {
    local copy
    copy=$(plant '    switch (' '    default:') && [ -n "$(defaults "$copy")" ] || return 1
    ! defaults memscale.h | grep .
}

# What a technique takes that is put in the middle of ms_technique: a row of MSI_TECHNIQUES at the
# same place, without which nothing compiles, and which brings its name, switch, tensors, modes and
# whether it is built to all that asks; and a case in each switch, which the compiler names. One that
# has the cases of early updates has their bytes off the peak, however many techniques there are.
check_new_technique() {
    local copy text
    compile -DMEMSCALE_IMPLEMENTATION memscale.h || return 1
    copy=$(plant '    MS_TECHNIQUE_EARLY_UPDATE,' '    MS_TECHNIQUE_PLANTED,') || return 1
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION "$copy" 2>&1) || return 1
    grep -q msi_technique_rows_match <<< "$text" || { echo "without a row: $text"; return 1; }
    sed -i 's/X(MS_TECHNIQUE_OFFLOADING,/X(MS_TECHNIQUE_PLANTED, tiling, "planted", 0, "", 0) &/' "$copy"
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION "$copy" 2>&1) || return 1
    ! grep -q msi_technique_rows_match <<< "$text" && grep -q "MS_TECHNIQUE_PLANTED.*switch" <<< "$text" ||
        { echo "with a row: $text"; return 1; }
    sed -i 's/^ *case MS_TECHNIQUE_EARLY_UPDATE:/    case MS_TECHNIQUE_PLANTED:\n&/' "$copy"
    mv "$copy" $checks/memscale.h || return 1
    sed -n '/^#define MEMSCALE_IMPLEMENTATION/,/^```/{/^```/!p}' docs/decision-engine.md |
        sed 's/^.*ms_print_plan(m, show, stdout);/    ms_memory_report r;\
            if (ms_report(m, \&r) != MS_RESULT_OK || r.freed_bytes[MS_TECHNIQUE_CHECKPOINTING] <= 0 ||\
                r.freed_bytes[MS_TECHNIQUE_EARLY_UPDATE] <= 0 ||\
                r.freed_bytes[MS_TECHNIQUE_PLANTED] != r.freed_bytes[MS_TECHNIQUE_EARLY_UPDATE]) {\
                return 2;\
            }\
            (void)show;/' > $checks/planted.c
    ${CC:-cc} -std=c99 -Wall -Werror -I$checks -o $checks/planted $checks/planted.c -lm -pthread &&
        $checks/planted
}

# What an op takes that is put in the middle of MSI_OPS: a row with all that there is to know of it,
# and a case in the one switch over ops, that which runs them.
check_new_op() {
    local copy text row='PLANTED, "planted", ZERO, FILL, 1, COMPUTE'
    copy=$(plant '    X(ZERO, ' "    X($row, COUNT, 0) \\\\") || return 1
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION "$copy" 2>&1) || return 1
    grep -q 'MSI_OP_PLANTED.*switch' <<< "$text" || { echo "no case is asked for: $text"; return 1; }
    copy=$(plant '    X(ZERO, ' "    X($row) \\\\") || return 1
    ! compile -DMEMSCALE_IMPLEMENTATION "$copy" > /dev/null 2>&1
}

# What an optimizer takes that is put in the middle of ms_optimizer_kind: a row of MSI_OPTIMIZERS, which
# the compiler asks for; then a function for an element and its twin for vectors, which it asks for by
# name. No other place knows how many there are.
check_new_optimizer() {
    local copy text row='planted, 1, 0, MSI_ANY_FORMAT, false, false, true, false, 1e-3f, 0.0f, 0.9f, 0.9f, 0.0f'
    copy=$(plant '    MS_OPTIMIZER_SGD,' '    MS_OPTIMIZER_PLANTED,') || return 1
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION "$copy" 2>&1) || return 1
    grep -q "MS_OPTIMIZER_PLANTED.*switch" <<< "$text" && grep -q msi_each_kind_has_a_number <<< "$text" || { echo "without a row: $text"; return 1; }
    sed -i "s/    X(MS_OPTIMIZER_LION, lion/    X(MS_OPTIMIZER_PLANTED, $row) &/" "$copy"
    ! text=$(compile -mavx2 -mfma -DMEMSCALE_IMPLEMENTATION "$copy" 2>&1) || return 1
    grep -q msi_planted_element <<< "$text" && grep -q msi_wide_planted <<< "$text" ||
        { echo "with a row: $text"; return 1; }
}

complains() { # COPY OPTIONS WORDS: the compiler refuses it and names each
    local text word copy=$1 options=$2
    shift 2
    ! text=$(compile $options "$copy" 2>&1) || { echo "compiles without $*"; return 1; }
    for word; do
        grep -q -- "$word" <<< "$text" || { echo "$word is not named: $text"; return 1; }
    done
}

# What a format takes: of dtypes that layers can be called in, and of codes for state, a row of
# MSI_FORMATS, and each place that has to know it, which the compiler names, on the host and in CUDA.
check_new_format() {
    local copy here='-DMEMSCALE_IMPLEMENTATION -mavx2 -mfma'
    local cuda='-x c++ -std=c++11 -Wno-attributes -Itests/emulation -D__CUDACC__=1 -DMEMSCALE_CUDA_IMPLEMENTATION'
    copy=$(plant '    X(MS_DTYPE_BF16, "bf16", 2)' '    X(MS_DTYPE_F8, "f8", 1) \\') || return 1
    complains "$copy" "$here" msi_each_dtype_has_a_format || return 1
    sed -i 's/    X(BF16, bf16,/    X(F8, f8, uint8_t, MS_DTYPE_F8, MS_STATE_FORMAT_COUNT, 1) \\\n&/' "$copy"
    complains "$copy" "$here" msi_f32_of_f8 msi_f8_of_f32 msi_f8_at_random msi_cpu_chunk_has_each_pair \
        msi_gemm_packs_each_format 'MSI_FORMAT_F8.*switch' || return 1
    complains "$copy" "$cuda" msi_cuda_moves_f8 msi_cuda_f8 || return 1
    copy=$(plant '    MS_STATE_FORMAT_8BIT,' '    MS_STATE_FORMAT_4BIT,') || return 1
    complains "$copy" "$here" msi_each_state_format_has_one msi_wide_has_each_state_format \
        'MS_STATE_FORMAT_4BIT.*switch' || return 1
    sed -i 's/    X(8BIT, 8bit,/    X(4BIT, 4bit, uint8_t, MS_DTYPE_COUNT, MS_STATE_FORMAT_4BIT, 128) \\\n&/' "$copy"
    complains "$copy" "$here" msi_4bit_decode msi_4bit_encode || return 1
    complains "$copy" "$cuda" msi_cuda_decode_4bit msi_cuda_encode_4bit
}

# What tests/engines.c prints with a header.
trained_by() { # HEADER FLAGS
    local folder
    folder=$(mktemp -d $checks/engines.XXXXXX)
    cp "$1" $folder/memscale.h
    shift
    ${CC:-cc} -std=c99 -Wall -Werror "$@" -I$folder -Iexamples -Ibench -o $folder/engines tests/engines.c \
        -lm -pthread && $folder/engines
}

# What an engine takes: a stream at the end of MEMSCALE_STREAMS and a row of MSI_ENGINES, which the
# compiler asks for; a function of the backend and two fields of the report, which the row names. Without
# instructions it changes nothing: bits, plan, times and program are the same. With an op, a planted one
# that half of the copies to the device go by, it is in program, report, simulation and trace, and the
# bits are the same.
check_new_engine() {
    local text copy=$checks/engine.h row op
    sed 's|X(MS_STREAM_NETWORK, "collectives of the ranks")|& X(MS_STREAM_PLANTED, "planted")|' memscale.h > $copy
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION $copy 2>&1) || return 1
    grep -q msi_streams_have_engines <<< "$text" || { echo "without a row: $text"; return 1; }

    row='PLANTED, PLANTED, copy_planted, to_device_gb_per_s, "planted", true, true, false, MSI_COUNTERS(planted)'
    sed -n '/^static int msi_cpu_copy_in(/,/^}/p' $copy |
        sed 's/copy_in/copy_planted/; s/TO_DEVICE/PLANTED/' > $copy.copy
    sed -i "/^static int msi_cpu_record(/e cat $copy.copy" $copy
    sed -i -e "s|^    X(GATHER, NETWORK, |    X($row) &|" \
        -e 's|^    double to_device_us, to_host_us;|& uint64_t planted_bytes; double planted_us;|' \
        -e 's|^    int (\*copy_out)(.*|& int (*copy_planted)(void *, void *, const void *, uint64_t);|' \
        -e 's|^    X(copy_out) .*|    X(copy_planted) &|' $copy
    trained_by memscale.h > $checks/plain && trained_by $copy -DPLANTED > $checks/idle &&
        grep -q '"tid":4,"name":"thread_name","args":{"name":"planted"}' $checks/idle &&
        diff $checks/plain <(grep -v planted $checks/idle) || { echo 'it does something'; return 1; }

    op='PLANTED, "planted", COPY_IN, LINK, 1, PLANTED, COUNT, MSI_PAIRS'
    sed -i -e "s|^    X(COPY_IN, |    X($op) &|" \
        -e 's|from_host ? MSI_OP_COPY_IN|from_host \&\& (i->target \& 1) ? MSI_OP_PLANTED : &|' $copy
    ! text=$(compile -DMEMSCALE_IMPLEMENTATION $copy 2>&1) || return 1
    grep -q 'MSI_OP_PLANTED.*switch' <<< "$text" || { echo "no case is asked for: $text"; return 1; }
    sed -i 's|^    case MSI_OP_COPY_IN:|    case MSI_OP_PLANTED: &|' $copy
    trained_by $copy -DPLANTED > $checks/busy || return 1
    diff <(grep ^loss $checks/plain) <(grep ^loss $checks/busy) || { echo 'other bits'; return 1; }
    cat $checks/plain $checks/busy | awk '
        /^step_us/ { before_us = us; us = $2 }
        /^planted/ { reported = $2 }
        /"ph":"X","pid":1,"tid":4/ { sub(/.*"bytes":/, ""); traced += $0 }
        END { print before_us " us; with it " us " us, " reported " bytes, of which " traced " are traced"
            exit !(us < before_us && reported > 0 && traced == reported) }'
}

# A kernel of nn.h is a row of NN_KERNELS: the compiler names what each device lacks, and two of another
# kind cannot be swapped. Nothing of a layer is anywhere but in the places that nn.h lists.
check_new_kernel() {
    local file text
    mkdir $checks/nn && cp memscale.h examples/nn*.h examples/blocks.h $checks/nn || return 1
    compile -I$checks/nn $checks/nn/nn.h || return 1
    sed -i 's|^    K(copy,|    K(planted, (const ms_call *call, nn_values y)) &|' $checks/nn/nn.h
    ! text=$(compile -I$checks/nn $checks/nn/nn.h 2>&1) || return 1
    grep -q nn_planted_kernel <<< "$text" || { echo "the CPU lacks it: $text"; return 1; }
    ! text=$(${CXX:-g++} -std=c++11 -Itests/emulation -I$checks/nn -DNN_CUDA_IMPLEMENTATION -D__CUDACC__=1 \
        -fsyntax-only -x c++ $checks/nn/nn.h 2>&1) || return 1
    grep -q nn_cuda_planted <<< "$text" || { echo "CUDA lacks it: $text"; return 1; }
    awk '
        /^\/\/ >>nn/ { section = FILENAME " " $0 }
        FILENAME ~ /tests/ && !(FILENAME in seen) { section = FILENAME; seen[FILENAME] = 1 }
        match($0, /^    K\([a-z0-9_]+,/) { kernel = substr($0, 7, RLENGTH - 7); kernels[kernel] = 1 }
        { lines[++count] = $0; of[count] = section; file[count] = FILENAME }
        END {
            for (kernel in kernels) {
                if (kernel ~ /_backward$/) { continue }
                places = 0
                split("", where)
                pattern = "(nn_(cuda_|op_|k_)?|->|K\\()" kernel \
                    "(_backward)?(_kernel|_forward|_options|_desc|_as)?[^a-z0-9_]"
                for (i = 1; i <= count; i++) {
                    if (lines[i] ~ pattern && of[i] !~ /nn block/ && !(of[i] in where)) { where[of[i]] = 1; places++ }
                }
                if (places > most) { most = places; worst = kernel }
                if (places < 3) { print kernel " is in " places " places: the pattern is wrong"; wrong = 1 }
            }
            print worst " is in " most " places"
            exit wrong || most > 12
        }' examples/nn.h examples/nn_cpu.h examples/nn_cuda.h examples/nn_cuda_*.h \
        tests/test_nn.c tests/test_half.c
}

# The listings, the trace and the metrics compile on the public half, where ms_model is opaque, and
# the section of texts alone: they know nothing else of the implementation.
check_listings() {
    local source=$checks/listings.c tag
    printf '%s\n' '#include "memscale.h"' '#include <stdarg.h>' '#include <stdio.h>' \
        '#include <string.h>' '#define msi_write_text snprintf' '#define msi_vformat vsnprintf' \
        '#define MSI_ZERO_INIT { 0 }' > $source
    grep -E '^#define MSI_(COLD|NOINLINE) +_' memscale.h >> $source
    sed -n '/^#define MSI_\(THEN\|DO\)(/,/[^\\]$/p' memscale.h >> $source
    for tag in text listing trace; do
        awk -v tag=">>$tag" '/^\/\/ (>>|=====)/ || /^#endif \/\/ MEMSCALE/ { inside = $2 == tag }
            inside { print; found = 1 }
            END { exit !found }' memscale.h >> $source || { echo "no section $tag"; return 1; }
    done
    compile $source
}

check_readme_program() {
    awk '/^```/ { inside = !inside && $0 == "```c"; if (inside) { text = "" }; next }
         inside { text = text $0 "\n" }
         inside && /^int main/ { whole = 1 }
         !inside && whole { exit }
         END { printf "%s", text }' README.md > $checks/readme.c
    diff $checks/readme.c examples/minimal.c
}

# The code of docs/recipes.md is in the test of it, word for word, except which headers it includes.
check_recipes() {
    awk '
        FNR == NR { source = source $0 "\n"; next }
        /^```/ {
            if (inside) {
                if (index(source, text) == 0) { print "tests/test_recipes.c has not what follows line " begin; wrong = 1 }
                blocks++
            }
            inside = !inside && $0 == "```c"
            text = ""
            begin = FNR
            next
        }
        inside && !/^#include/ { text = text $0 "\n" }
        END { exit wrong || blocks < 15 }' tests/test_recipes.c "${1:-docs/recipes.md}" || return 1
    [ $# -eq 0 ] || return 0
    sed 's/(1.0f - decay)/(1.5f - decay)/' docs/recipes.md > $checks/recipes.md
    ! check_recipes $checks/recipes.md > $checks/recipes.log && [ -s $checks/recipes.log ]
}

"check_$1"
