#!/usr/bin/env bash
# Compiles the C snippets of one document as C, checks that they are C++ too, and runs those that are
# whole programs.
# A snippet is a block fenced by ```c or, in the manual of a header, lines indented by eight behind a
# blank line. One with a main is a program; a block without a language right after it is what it must
# print. The others form one file: definitions stand first; of
# statements, each snippet is a block inside the one before, so that it sees what that declared.
# A block fenced by ```cuda is a program for nvcc, which the emulation of tests/emulation runs.
set -u
document=$1
out=${checks:-build/check}/snippets.$(basename "$document")
rm -rf "$out"
mkdir -p "$out"

awk -v out="$out" -v document="$document" '
function add(line) {
    if (line ~ /^#define MEMSCALE_CUDA_IMPLEMENTATION/ && !cuda) { line = "" } # for nvcc
    whole = whole line "\n"
    if (line ~ /^#/ && !cuda) {
        directives = directives line "\n"
        line = ""
    }
    text = text line "\n"
}
function begin(line) {
    place = "#line " line " \"" document "\"\n"
}
function finish() {
    if (text == "") { return }
    ++count
    if (text ~ /(^|\n)int main\(/) {
        print whole > (out "/program" count (cuda ? ".cu" : ".c"))
        printed = out "/program" count ".expected"
    } else if (text ~ /(^|\n)(static|typedef|struct|enum) /) {
        definitions = definitions place text
    } else {
        statements = statements "{\n" place text
        closing = closing "}\n"
    }
    text = whole = ""
}
/^```/ {
    fenced = !fenced
    expected = fenced && $0 == "```" ? printed : ""
    if (fenced && $0 ~ /^```c(uda)?$/) { code = 1; cuda = $0 != "```c"; begin(NR + 1) } else { finish(); code = 0 }
    next
}
expected != "" { print > expected }
!fenced && $0 != "" { printed = "" }
code { add($0) }
document ~ /\.h$/ && !manual_over {
    if ($0 ~ /^\*\//) { finish(); manual_over = 1 }
    else if ($0 ~ /^        / && (blank || text != "")) {
        if (text == "") { begin(NR) }
        add(substr($0, 9))
    } else if ($0 != "") { finish() }
    blank = $0 == ""
}
END {
    finish()
    printf "#undef _XOPEN_SOURCE\n#define _XOPEN_SOURCE 700 // for initstate and setstate\n" > (out "/fragments.c")
    printf "%s#include \"tests/snippets.h\"\n%s", directives, definitions > (out "/fragments.c")
    print "void snippets(void);\nvoid snippets(void) {\n" statements closing "}" > (out "/fragments.c")
    print count + 0 > (out "/count")
}' "$document"

# A snippet may leave out what a real program checks.
flags="-Wall -Wextra -Wno-unused -Wno-unused-result -Wno-missing-field-initializers -Werror -I."
[ "$document" != README.md ] || flags="$flags -O2" # its program trains
status=0
try() { # COMPILER
    $1 $flags "$source" -o "$object" $link && $run > "$object.printed" || status=1
    [ ! -f "$object.expected" ] || diff "$object.expected" "$object.printed" || status=1
}
for source in "$out"/*.c; do
    object=${source%.c}
    case $source in
    */fragments.c) link=-c run= ;;
    *) link=-lm run="timeout 180 $object" ;;
    esac
    try "$CC -std=c99"
    if command -v "$CXX" > /dev/null; then
        $CXX -x c++ -std=c++11 $flags -fsyntax-only "$source" || status=1
    fi
done
for source in "$out"/*.cu; do
    [ -f "$source" ] || continue
    object=${source%.cu}
    link="-x none build/emulated/cuda.a -lm -pthread" run="timeout 180 $object"
    $MAKE -s --no-print-directory werror=1 build/emulated/cuda.a || status=1
    try "$CXX -x c++ -std=c++11 -D__CUDACC__=1 -Itests/emulation"
    if [ -n "${NVCC-}" ]; then
        "$NVCC" -std=c++17 -arch=sm_75 -Werror all-warnings -I. "$source" -o "$object.nvcc" -lcublas ||
            status=1
    fi
done
[ $status -eq 0 ] && echo "[  PASSED  ] $(cat "$out/count") test(s)."
exit $status
