#!/usr/bin/env bash
# gpu_first.sh PROGRAM: what there is to know of a GPU at first, as a page for bench/results, on standard
# output and in gpu-first.md beside the program's folder. `make gpu-first` has built PROGRAM, bench/gpu, and
# calls this. Each part has a limit, and all of them GPU_SECONDS (600) from GPU_STARTED on, a time in
# seconds; what is left out for want of time is said. GPU_TINY=1: models and sizes for the tests. The
# exit status is 1 if a part failed or bits are not the same, and 2 where there is nothing to run on.
set -u
cd "$(dirname "$0")/.."
if [ $# -ne 1 ] || [ "$1" = --help ]; then
    echo 'usage: bench/gpu_first.sh build/cuda/bench/gpu; make gpu-first does it'
    [ "${1-}" = --help ]
    exit
fi
program=$1
page=$(dirname "$(dirname "$program")")/gpu-first.md
started=${GPU_STARTED:-$(date +%s)}
seconds=${GPU_SECONDS:-600}
tiny=${GPU_TINY:+--tiny}
wrong=0

if [ ! -x "$program" ]; then
    echo "$program is missing: make gpu-build makes it where there is nvcc, of the CUDA toolkit" >&2
    exit 2
fi
header=$("$program" --part machine --markdown) || {
    echo "$program finds no GPU that it can use; nvidia-smi has: $(nvidia-smi -L 2>&1 | head -n 4)" >&2
    exit 2
}

left() { # the seconds that are left, less what it takes to stop
    echo $((seconds - 5 - ($(date +%s) - started)))
}

part() { # TITLE LIMIT COMMAND: the command gets --seconds, after three quarters of which no row begins
    local title=$1 limit=$2 status
    shift 2
    printf '\n## %s\n\n' "$title"
    [ "$limit" -lt "$(left)" ] || limit=$(left)
    if [ "$limit" -lt 5 ]; then
        echo 'Left out for want of time.'
        return
    fi
    timeout --kill-after=5 "$limit" "$@" --markdown --seconds $((limit * 3 / 4)) 2>&1
    status=$?
    [ $status -eq 0 ] || wrong=1
    case $status in
    0) ;;
    124 | 137) printf '\nStopped after %s s.\n' "$limit" ;;
    *) printf '\nFailed, with exit status %s.\n' "$status" ;;
    esac
}

machine() {
    echo "$header"
    echo "- host: $(nproc) processors, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(
        awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo), $(uname -sr)"
    nvidia-smi --format=csv,noheader --query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max,ecc.mode.current 2> /dev/null |
        head -n 1 | sed 's/^/- driver, clocks, power limit, PCIe generation and lanes, ECC: /'
}

rival() {
    local missing
    if ! missing=$(python3 -c 'import torch
assert torch.cuda.is_available(), "it finds no CUDA device"' 2>&1); then
        printf '\n## PyTorch\n\nSkipped: %s\n' "$(tail -n 1 <<< "${missing:-python3 is missing}")"
        return
    fi
    part 'PyTorch' 150 python3 bench/gpu_pytorch.py --part steps
}

everything() {
    local gpu="$program ${tiny:+--tiny --steps 2 --warmup 1}"
    echo '# First figures of a GPU'
    echo
    machine
    part 'Copies' 30 $gpu --part copies
    part 'Kernels' 40 $gpu --part executor,kernels
    part 'Matrix products' 50 $gpu --part products
    part 'The same bits, wrapped and plain' 40 $program --tiny --steps 2 --warmup 1 --part workloads
    part 'Steps of GPT-2 124M' 110 $gpu ${tiny:---steps 12 --model gpt2-124M} --part steps
    rival
    [ -n "$tiny" ] || part 'Steps of GPT-2 774M' 170 $gpu --steps 12 --model gpt2-774M --part steps
    part 'Slices' 50 $gpu --part slices
    printf '\nIn %s s of %s.\n' $(($(date +%s) - started)) "$seconds"
    return $wrong
}

set -o pipefail
everything | tee "$page"
