#!/usr/bin/env bash
# The tests on a real GPU, for `make test-gpu`, which names the test programs and gives the C
# compiler, its flags for the CUDA runtime and MAKE in the environment. Then compute-sanitizer on a
# small model, where it is found. The last line has the totals; the exit status is 1 if anything
# failed, and 2 where there is no GPU.
set -u
cd "$(dirname "$0")/.."
logs=build/cuda/logs
mkdir -p $logs
passed=0 failed=0 skipped=0

# ---- the GPU -------------------------------------------------------------------------------------

cat > $logs/devices.c << 'END'
#include <cuda_runtime.h>
#include <stdio.h>

int main(void) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    for (int i = 0; i < count; i++) {
        struct cudaDeviceProp device;
        if (cudaGetDeviceProperties(&device, i) == cudaSuccess) {
            printf("device %d: %s, compute capability %d.%d\n", i, device.name, device.major,
                   device.minor);
        }
    }
    if (count == 0) {
        printf("%s\n", cudaGetErrorString(error));
    }
    return count == 0;
}
END
$CC -std=c99 $CUDA_FLAGS $logs/devices.c -o $logs/devices $CUDA_LINK || exit 1
if ! $logs/devices > $logs/devices.txt; then
    echo "no GPU is here ($(cat $logs/devices.txt)): nothing is tested on one; make test has the emulation"
    exit 2
fi
cat $logs/devices.txt
command -v nvidia-smi > /dev/null &&
    nvidia-smi --query-gpu=driver_version,memory.total --format=csv,noheader | sed 's/^/driver and memory: /'

# ---- the tests -----------------------------------------------------------------------------------

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
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '  %-44s %s passed, %s failed, %s skipped\n' "$1" "$p" "$f" "$s"
    [ "$f" -eq 0 ] || { grep -E 'rror|FAILED|Hazard|Invalid' "$2" || tail -n 20 "$2"; } | head -n 20 |
        sed 's/^/      /'
}

for program in "$@"; do
    log=$logs/$(basename "$program").log
    $MAKE -s --no-print-directory "$program" > "$log" 2>&1 && timeout 600 "$program" >> "$log" 2>&1
    report "$program" "$log" $?
done

# ---- compute-sanitizer ---------------------------------------------------------------------------

sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-}/bin/compute-sanitizer")
small="build/cuda/bench/gpu --tiny --steps 2 --warmup 1"
if [ -x "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        "$sanitizer" --tool $tool --error-exitcode 9 $small > $logs/$tool.log 2>&1
        report "compute-sanitizer $tool: bench/gpu --tiny" $logs/$tool.log $?
    done
else
    echo '  compute-sanitizer is not here (it comes with the CUDA toolkit): left out'
    skipped=$((skipped + 2))
fi

printf '\n%d passed, %d failed, %d skipped\n' $passed $failed $skipped
[ $failed -eq 0 ]
