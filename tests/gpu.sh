#!/usr/bin/env bash
# gpu.sh has-gpu: whether there is a GPU of NVIDIA's here; if not, it says so, and the exit status is 2.
# gpu.sh FOLDER TESTS: the tests on it, for `make test-gpu`, which has built them in FOLDER/tests with the
# benchmark beside them. Several run at a time. Then compute-sanitizer on a small model, where it is found;
# COMPUTE_SANITIZER is its path, or none. The last line has the totals; the exit status is 1 if anything
# failed, and 2 where CUDA has no device.
set -u
cd "$(dirname "$0")/.."

if [ "$1" = has-gpu ]; then
    nvidia-smi -L 2> /dev/null | grep -q '^GPU' && exit 0
    for device in /dev/nvidia[0-9]* /dev/nvhost-gpu; do
        [ ! -e "$device" ] || exit 0
    done
    echo 'there is no NVIDIA GPU here: nvidia-smi is missing or lists none, and /dev has no nvidia0.'
    echo 'make test has the tests on an emulated one. make gpu-build CUDA_CODES=sm_90 builds for a GPU that is'
    echo 'elsewhere: take build/cuda there, in a checkout of the same commit, for make gpu-first.'
    exit 2
fi

export folder=$1 logs=$1/logs
shift
rm -rf "$logs"
mkdir -p "$logs"
passed=0 failed=0 skipped=0

if ! "$folder/bench/gpu" --part machine; then
    echo 'nothing is tested on a GPU; make test has the emulation'
    exit 2
fi

tally() { # LOG WORD
    awk -v word="$2" 'index($0, "[  " word) == 1 && /test\(s\)/ {
        sub(/^[^]]*\] /, ""); sum += $1 } END { print sum + 0 }' "$1"
}

report() { # NAME LOG STATUS: a program that prints no summary of cmocka's counts as one test
    local p f s
    p=$(tally "$2" PASSED) f=$(tally "$2" FAILED) s=$(tally "$2" SKIPPED)
    if [ "$3" -eq 0 ]; then
        [ $((p + s)) -gt 0 ] || p=1
    else
        [ "$f" -gt 0 ] || f=1
    fi
    echo "$p $f $s" > "${2%.log}.counts"
    printf '%s\n' "$(
        printf '  %-44s %s passed, %s failed, %s skipped' "$1" "$p" "$f" "$s"
        [ "$3" -ne 124 ] || printf ', stopped after 600 s'
        [ "$f" -eq 0 ] || { echo && { grep -E 'rror|FAILED|Hazard|Invalid' "$2" || tail -n 20 "$2"; } |
            head -n 20 | sed 's/^/      /'; }
    )" # at once, since others print too
}

run_test() { # NAME
    local log=$logs/$1.log
    timeout 600 "$folder/tests/$1" > "$log" 2>&1
    report "$1" "$log" $?
}

check_small() { # TOOL: of compute-sanitizer
    local log=$logs/$1.log
    timeout 600 "$sanitizer" --tool "$1" --error-exitcode 9 "$folder/bench/gpu" --tiny --steps 2 --warmup 1 \
        --part workloads > "$log" 2>&1
    report "compute-sanitizer $1: bench/gpu --tiny" "$log" $?
}

export -f tally report run_test
processors=$(nproc 2> /dev/null || echo 2)
printf '%s\n' "$@" | xargs -P $((processors < 4 ? processors : 4)) -I{} bash -c 'run_test {}'

sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-}/bin/compute-sanitizer")}
if [ -x "$sanitizer" ]; then
    check_small memcheck
    check_small racecheck
else
    echo '  compute-sanitizer is not here (it comes with the CUDA toolkit): left out'
    skipped=2
fi

for name in "$@" memcheck racecheck; do
    [ -f "$logs/$name.counts" ] || continue
    read -r p f s < "$logs/$name.counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
printf '\n%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ]
