#!/usr/bin/env bash
# run.sh TIERS: the checks of these tiers, one line each, in a fixed order, though as many run at a
# time as there are processors. make calls this with the compilers, warnings and libraries in the
# environment: `make test` with the tier `quick`, `make test-broad` with `broad`, `make test-all` with
# all three. ONLY=emulated runs the groups with that in their names. The last line has the totals, which
# go to the end of the file TOTALS instead where that is given; the exit status is 1 if anything failed.
#
# quick: each test program once, in the configuration in which it finds most for its time, with short
# sweeps; and one of each other kind of check.
# broad: the tests with sanitizers and, as C++11, on the emulated device; what computes, with -Ofast;
# each way to include the header, all programs, other machines and nvcc.
# full: longer sweeps, by the release configuration; each test in each configuration, each way to
# include the header by each compiler.
#
# A check is a shell command: status 0 is a pass, 77 a skip (its last line says why). One that prints
# cmocka's summary counts as many tests as that names. The line of a check ends with the seconds of
# processor time that it took.
set -u
shopt -s nullglob
cd "$(dirname "$0")/.."
unset MAKEFLAGS MFLAGS MAKEOVERRIDES

export CC=${CC:-cc} CXX=${CXX:-g++} MAKE=${MAKE:-make}
export WARNINGS=${WARNINGS-} WARNINGS_C=${WARNINGS_C-} OPENMP=${OPENMP-} CBLAS=${CBLAS-} CMOCKA=${CMOCKA-}
export NVCC=${NVCC-} MPI=${MPI-}
tiers=" ${*:-quick} "
only=${ONLY-}
export checks=build/check$(tr ' ' . <<< "${tiers% }")${only:+.${only//[^A-Za-z0-9]/_}}
# Two programs at a time share the processors: threads that wait must not spin.
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
export UBSAN_OPTIONS=print_stacktrace=1
rm -rf $checks
mkdir -p $checks

# ---- the list of checks --------------------------------------------------------------------------

group() {
    wanted=$([[ $1 == *${ONLY-}* ]] && echo yes)
    title=$1
}

check() { # TIER NAME COMMAND
    [[ $wanted && $tiers == *" $1 "* ]] || return 0
    [ -z "$title" ] || printf '%s\n' "$title" > "$checks/$(($(wc -l < $checks/list) + 1)).group"
    title=
    printf '%s\t%s\n' "$2" "$3" >> $checks/list
}

# ---- what checks are made of ---------------------------------------------------------------------

skip() {
    echo "$1"
    exit 77
}

need() {
    command -v "$1" > /dev/null || skip "no $1"
}

build() { # CONFIG PROGRAM: by one check at a time, others find it up to date
    case $2 in *_cpp) need "$CXX" ;; esac
    [ "$1" != fast_clang ] || need clang
    flock "$checks/${2//\//_}.lock" $MAKE -s --no-print-directory werror=1 config="$1" "$2"
}

run_test() { # CONFIG PROGRAM [PERCENT OF THE FULL SWEEPS]
    [ -n "$CMOCKA" ] || skip 'no cmocka'
    build "$1" "$2" && MEMSCALE_TEST_SWEEP=${3-} "$2"
}

# The thread sanitizer cannot start where the kernel lays out memory in ways that it does not know.
run_threads() { # PROGRAM [PERCENT OF THE FULL SWEEPS]
    [ -n "$CMOCKA" ] || skip 'no cmocka'
    echo 'int main(void) { return 0; }' | $CC -fsanitize=thread -x c - -o "$checks/thread" -lm &&
        "$checks/thread" || skip 'no thread sanitizer'
    build thread "$1" && MEMSCALE_TEST_SWEEP=${2-} "$1"
}

# Ranks share processors. Open MPI must be told so, and that it may run as root.
run_mpi() { # RANKS PROGRAM ARGUMENTS
    local ranks=$1 program=$2 may= config=release
    shift 2
    [ -n "$MPI" ] || skip 'no MPI'
    need mpirun
    [[ $program != build/quick/* ]] || config=quick
    build $config "$program" || return 1
    ! mpirun --version 2>&1 | grep -q 'Open MPI' || may=--oversubscribe
    [ -z "$may" ] || [ "$(id -u)" -ne 0 ] || may="$may --allow-run-as-root"
    timeout 120 mpirun $may ${mpi_options-} -n "$ranks" "$program" "$@"
}

# With Open MPI, whose ranks may outlive another one.
check_killed() { # killed OR asleep, HOW MANY RANKS END IN TIME
    local log=$checks/mpi_$1
    mpirun --version 2>&1 | grep -q 'Open MPI' || skip 'no Open MPI'
    mpi_options=--enable-recovery run_mpi 3 build/quick/tests/mpi_killed "$1" 1 > "$log" 2>&1
    [ "$(grep -c 'in time$' "$log")" = "$2" ] || { cat "$log"; return 1; }
}

run_corpus() { # PROGRAM FOLDER
    build sanitize "$1" && "$1" "$2"/*
}

run_program() { # "COMMAND [=> COLUMNS]": the table that it prints has these columns in every row
    local config=release command=${1%% =>*} output
    [[ $command != build/quick/* ]] || config=quick
    output=$(mktemp $checks/output.XXXXXX)
    build $config "${command%% *}" && $command > "$output" || return 1
    [[ $1 != *" => "* ]] || tr '\t' ' ' < "$output" | awk -v columns="${1##*=> }" '
        NR == 1 { fields = NF; wrong = $0 != columns }
        NF != fields { wrong = 1 }
        wrong { print "unexpected: " $0; exit }
        END { exit wrong || NR < 2 }'
}

compile() { # COMPILER ARGUMENTS: the flags of the house
    local compiler=$1 dialect
    shift
    case $compiler in
    *++) dialect="-x c++ -std=c++11" ;;
    *) dialect="-std=c99 $WARNINGS_C" ;;
    esac
    "$compiler" $dialect $WARNINGS -Werror -O1 -I. -Iexamples "$@"
}

run_test_with() { # FLAGS SOURCE
    local program
    [ -n "$CMOCKA" ] || skip 'no cmocka'
    program=$(mktemp $checks/test.XXXXXX)
    compile $CC $1 -Ibuild/private -Itests -Wno-missing-prototypes tests/library.c "$2" -o "$program" $CMOCKA -lm &&
        "$program"
}

# Plans that a build with the planner saves are loaded by one without it, which trains to the same bits.
check_unplanned() {
    local flags
    export MEMSCALE_TEST_PLANS=$checks/plans
    mkdir -p $MEMSCALE_TEST_PLANS
    run_test quick build/quick/tests/test_saved_plans || return 1
    for flags in '' -DMEMSCALE_NO_SYSTEM; do
        run_test_with "-march=native -DMEMSCALE_NO_PLANNER $flags" tests/test_saved_plans.c || return 1
    done
}

# One cell of the compile matrix: a program builds without a warning, and does what it should.
cell() { # COMPILER ARGUMENTS
    need "$1"
    local program
    program=$(mktemp $checks/cell.XXXXXX)
    compile "$@" -o "$program" -lm && "$program"
}

# nvcc has warnings of its own; those of the house go to the host's compiler, but for two that CUDA's
# own headers do not keep to.
compile_nvcc() { # ARGUMENTS
    local host
    [ -n "$NVCC" ] || skip 'no nvcc'
    host=$(printf ' -Xcompiler %s' $(sed -E 's/-W(pedantic|undef|error)( |$)/ /g' <<< "$WARNINGS"))
    "$NVCC" -std=${CUDA_STD:-c++17} -Werror all-warnings -arch=sm_75 $host -I. -Iexamples -O1 "$@"
}

cell_nvcc() { # ARGUMENTS
    local program
    program=$(mktemp $checks/cell.XXXXXX)
    compile_nvcc "$@" -o "$program" && "$program"
}

# The CUDA part in a translation unit of its own, which exports one function, and a C program on it.
cell_cuda_object() {
    local object=$checks/cuda_part.o
    compile_nvcc -c tests/compile_cuda.cu -o $object || return 1
    [ "$(nm -g --defined-only $object | awk '$2 !~ /[VW]/ { print $3 }')" = ms_backend_cuda ] ||
        { nm -g --defined-only $object; return 1; }
    compile gcc -DMEMSCALE_IMPLEMENTATION -DCOMPILE_CUDA -c tests/compile_program.c \
        -o $checks/cuda_program.o && "$NVCC" $checks/cuda_program.o $object -lcublas -o $checks/cuda_program &&
        $checks/cuda_program
}

# What is for nvcc is refused by others, with the cure.
check_cuda_refusal() {
    local text
    ! text=$(compile gcc -DMEMSCALE_CUDA_IMPLEMENTATION -fsyntax-only tests/compile_program.c 2>&1) &&
        grep -q '#error.*nvcc.*\.cu file' <<< "$text"
}

# As make test-gpu does, which there is seldom a GPU for.
cell_cuda_tests() {
    local source status=0
    for source in tests/test_cuda*.c; do
        compile_nvcc -Ibuild/private -Itests -DT_CUDA -DNN_CUDA -x cu -c "$source" -o "$checks/kernels.o" || status=1
    done
    return $status
}

# As make cuda builds them: the object for these devices, and the C programs on it.
build_cuda() { # CODES
    [ -n "$NVCC" ] || skip 'no nvcc'
    $MAKE -s --no-print-directory werror=1 CUDA_CODES="$1" cuda &&
        build/cuda/examples/gpt2 --preset tiny --steps 1
}

cell_library() { # COMPILER NAME FLAG ARGUMENTS
    [ -n "$3" ] || skip "no $2"
    cell "$1" "${@:4}" $3
}

# NCCL's own header, and the emulation's in the place of CUDA's. NCCL_INCLUDE: where it is.
cell_nccl() {
    local compiler
    [ -f "${NCCL_INCLUDE-}/nccl.h" ] || skip 'no nccl.h in NCCL_INCLUDE'
    for compiler in gcc g++ clang clang++; do
        ! command -v $compiler > /dev/null ||
            compile $compiler -DMEMSCALE_IMPLEMENTATION -DMEMSCALE_NCCL -isystem "$NCCL_INCLUDE" -isystem tests/emulation \
                -fsyntax-only tests/compile_program.c || return 1
    done
}

# In the newest dialects what old ones let pass is deprecated, such as arithmetic between two enums.
cell_newest() { # COMPILER DIALECT SOURCES
    need "$1"
    local source status=0
    for source in "${@:3}"; do
        case $source in
        *.cu) set -- "$1" "$2" -Itests/emulation -D__CUDACC__=1 ;;
        tests/*) set -- "$1" "$2" -DMEMSCALE_IMPLEMENTATION ;;
        *) set -- "$1" "$2" $(done_for "$source") ;;
        esac
        compile "$1" -std=$2 -Wno-missing-field-initializers -Wno-missing-braces "${@:3}" \
            -fsyntax-only "$source" || status=1
    done
    return $status
}

# A program for another machine: built by its compiler, then run by what stands in for the machine.
cell_elsewhere() { # RUNNER COMPILER FLAGS SOURCE ARGUMENTS
    need "$2"
    local program
    program=$(mktemp $checks/elsewhere.XXXXXX.exe)
    compile "$2" $3 "$4" -static -o "$program" -lm -pthread || return 1
    need "$1"
    WINEDEBUG=-all WINEPREFIX=$PWD/$checks/wine "$1" "$program" "${@:5}"
}

# What is for MSVC: clang in its dialect and for its ABI, with the headers and the libraries of mingw-w64
# in place of those of the Windows SDK, which a C++ exception would need. cl.exe itself is not here.
cell_msvc() { # DIALECT ARGUMENTS
    need clang
    need x86_64-w64-mingw32-gcc
    local program include=/usr/x86_64-w64-mingw32/include
    [ -f $include/windows.h ] || skip "no $include"
    program=$(mktemp $checks/msvc.XXXXXX)
    clang --target=x86_64-pc-windows-msvc -fms-extensions -fms-compatibility -fms-compatibility-version=19.29 $1 \
        -nostdlibinc -isystem $include -D_WIN32_WINNT=0x0A00 -include tests/msvc_headers.h -I. $WARNINGS \
        -Wno-missing-field-initializers -Werror -O1 -c "${@:2}" -o "$program.o" &&
        x86_64-w64-mingw32-gcc "$program.o" -static -Wl,--defsym=__chkstk=___chkstk_ms -o "$program.exe" -lm || return 1
    need wine
    WINEDEBUG=-all WINEPREFIX=$PWD/$checks/wine wine "$program.exe"
}

cell_mixed() { # C_COMPILER CXX_COMPILER: a C++ program on an implementation that was compiled as C
    need "$1" && need "$2"
    local object=$checks/mixed.$1.o
    compile "$1" -c tests/compile_implementation.c -o "$object" &&
        cell "$2" tests/compile_program.c -x none "$object"
}

cell_cpp() { # C_COMPILER CXX_COMPILER FLAGS: the part for C++
    need "$1" && need "$2"
    [ -n "$CMOCKA" ] || skip 'no cmocka'
    local object
    object=$(mktemp $checks/cpp.XXXXXX)
    compile "$1" -O1 -c tests/compile_implementation.c -o "$object.o" &&
        "$2" -std=c++11 $3 $WARNINGS -Werror -O1 -I. tests/test_cpp.cpp \
            "$object.o" -o "$object" $CMOCKA -lm -pthread && "$object"
}

# The robot takes nothing from the heap, loses at most what it has learned since its last save when the
# power is cut, and is better from the start with what it has saved. Random bytes of the same size are
# refused, at the start and while it moves: it learns as it would without them.
check_robot() {
    local program=$checks/robot state=$checks/robot.state output=$checks/robot.txt
    rm -f "$state"
    "$CC" -std=c99 -O2 -I. examples/robot.c tests/no_heap.c -o "$program" -lm -pthread \
        -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc || return 1
    "$program" --seconds 20 --state "$state" --die 12 > "$output"
    [ $? -eq 137 ] && [ -s "$state" ] || { echo 'no state after a power cut'; return 1; }
    "$program" --seconds 15 --state "$state" > "$output.2" || return 1
    grep -q 'state: new' "$output" && grep -q 'state: loaded' "$output.2" || return 1
    awk '$2 == "s:" { print $4 }' "$output" "$output.2" | awk '
        { error[NR] = $1 } # 10 s; 10 s and 15 s of the second life
        END { exit !(NR == 3 && error[2] < error[1] / 3 && error[3] < 0.05) }' ||
        { echo "it has not learned:"; cat "$output" "$output.2"; return 1; }
    head -c "$(stat -c %s "$state")" /dev/urandom > "$state.random"
    cp "$state.random" "$state"
    "$program" --seconds 4.9 --state "$state" --reload 3 > "$output.3" && cmp "$state.random" "$state" &&
        [ "$(grep -c 'state: refused' "$output.3")" -eq 2 ] &&
        awk '$2 == "s:" { exit !($4 < 0.4 && $6 > 50) }' "$output.3" || { cat "$output.3"; return 1; }
    "$program" --save-plan "$state.plan" && build release build/examples/robot_board &&
        build/examples/robot_board --seconds 5 --plan "$state.plan" > "$output.4" &&
        grep -q 'plan: loaded' "$output.4" && printf x >> "$state.plan" &&
        build/examples/robot_board --seconds 1 --plan "$state.plan" > "$output.5" &&
        grep -q 'plan: .*damaged' "$output.5" || { cat "$output.4" "$output.5"; return 1; }
}

# A run that is interrupted after some steps and resumed prints the losses of one that is not, and saves
# the same bytes.
check_resume() { # STEPS COMMAND
    local folder part program=$2
    [[ $program != build/quick/* ]] && build release "$program" || build quick "$program" || return 1
    folder=$(mktemp -d $checks/resume.XXXXXX)
    mkdir $folder/straight $folder/parts
    run_part() { # FOLDER OPTIONS COMMAND
        ${@:3} --save $folder/$1 --checkpoint-every $steps $2 > $folder/output &&
            sed -nE 's/^.*(step +[0-9]+ ).*( loss [0-9.]+).*/\1\2/p; s/^([0-9]+ steps, loss [0-9.]+).*/\1/p' \
                $folder/output >> $folder/$1.losses
    }
    local steps=$1
    shift
    run_part straight '' "$@" && run_part parts "--resume --stop-at $steps" "$@" &&
        grep -q '^resumed   nothing' $folder/output && run_part parts --resume "$@" &&
        grep -q "^resumed   after step $steps," $folder/output || { cat $folder/output; return 1; }
    [ -s $folder/straight.losses ] && ! grep -vxFf $folder/parts.losses $folder/straight.losses || return 1
    for part in $folder/straight/*; do
        cmp $part $folder/parts/"$(basename "$part")" || return 1
    done
    [ -s $folder/straight/checkpoint-1.safetensors ] && rm -r $folder
}

# The implementation is an object of its own.
done_for() { # SOURCE
    grep -q private.h "$1" && echo -Ibuild/private || echo -DMEMSCALE_IMPLEMENTATION_DONE
}

cell_sources() { # COMPILER: C++ would rather see {} than {0}, which C programs write
    need "$1"
    local source status=0
    for source in examples/*.c examples/*/main.c bench/*.c; do
        compile "$1" $(done_for "$source") -Wno-missing-field-initializers -Wno-missing-braces -fsyntax-only \
            "$source" || status=1
    done
    return $status
}

# Every test in C++, without the time that code takes: make test runs them as C.
check_dialect() {
    need "$CXX"
    local source status=0
    for source in tests/test_*.c tests/fuzz_*.c; do
        case $source in */test_cuda*) continue ;; esac
        compile "$CXX" -Ibuild/private -Wno-missing-field-initializers -fsyntax-only "$source" || status=1
    done
    return $status
}

implementation() { # ARGUMENTS: the path of an object file built with these
    local object
    object=$(mktemp $checks/object.XXXXXX)
    $CC -std=c99 -O1 -U_FORTIFY_SOURCE -fno-stack-protector -I. "$@" -c tests/compile_implementation.c -o "$object" && echo "$object"
}

same() { # WHAT EXPECTED ACTUAL: files of sorted lines
    diff --unchanged-line-format= --old-line-format="$1 lacks: %L" \
        --new-line-format="$1 has beyond what is allowed: %L" "$2" "$3"
}

# Exactly the functions that the public half declares; those of CUDA, MPI and NCCL are MEMSCALE_CUDA_API.
check_exports() {
    local object
    object=$(implementation -O0) || return 1
    sed '/^#endif \/\/ MEMSCALE_H/q' memscale.h | tr '\n' ' ' | grep -o 'MEMSCALE_API[A-Z_]* [^;(]*(' |
        sed -n 's/.*[ *]\(ms_[a-z0-9_]*\)($/\1/p' | sort > $checks/declared
    nm -g --defined-only "$object" | awk '{ print $3 }' | sort > $checks/exported
    [ -s $checks/declared ] && same 'the object' $checks/declared $checks/exported
}

check_static_exports() {
    local object
    object=$(implementation -DMEMSCALE_STATIC) || return 1
    [ -z "$(nm -g --defined-only "$object")" ]
}

# Nothing beyond the list in docs/embedding.md and the arguments, and every argument indeed.
imports() { # FLAGS NAMES
    local object name gone='^none'
    [[ $1 != *MEMSCALE_NO_STDIO* ]] || gone='# stdio'
    [[ $1 != *MEMSCALE_NO_SYSTEM* ]] || gone='# '
    object=$(implementation $1) || return 1
    nm -u "$object" | awk '$2 != "_GLOBAL_OFFSET_TABLE_" { print $2 }' | sort > "$object.imported"
    { sed -n '/^```imports/,/^```$/p' docs/embedding.md | grep -v '^```' | grep -v "$gone" |
        sed 's/ #.*//'; printf '%s\n' $2; } | sort > "$object.allowed"
    for name in $2; do
        grep -qx "$name" "$object.imported" || { echo "$name is not used"; return 1; }
    done
    [ -s "$object.imported" ] && ! comm -23 "$object.imported" "$object.allowed" | grep .
}

# gcc takes for cold what leads to cold code too. What plans, and what a step runs, must not be.
check_cold() {
    local object
    need objdump
    object=$(implementation -O2) || return 1
    objdump -t "$object" | awk '$4 == ".text.unlikely" && $NF !~ /\./ { print $NF }' | sort > $checks/cold
    awk '/^\/\/ >>/ { tag = $2 (($2 == ">>backend" || $2 == ">>cuda") ? $3 : "") }
        /^(static|MSI_HD|MSI_WIDE) .*\(/ && tag ~ /^>>(tiles|emit|operands|homes|recompute|updates|lower|alias|cost|schedule|layout|fit|simulate|score|moves|greedy|lists|chain|exhaustive|grouping|solve|order|call|execute|optimizer|wide)$/ && !/MSI_COLD/ {
            sub(/\(.*/, ""); sub(/.*[ *]/, ""); print }' memscale.h | sort > $checks/warm
    [ -s $checks/cold ] && [ -s $checks/warm ] && ! comm -12 $checks/cold $checks/warm | grep .
}

# Names that the preprocessor defines inside the header. Others would leak into the user's code.
macros() { # FLAGS PATTERN
    local leaked
    $CC -std=c99 -I. -E -dD $1 -include memscale.h -x c /dev/null |
        awk '/^# [0-9]/ { inside = $3 ~ /memscale\.h"$/ } inside && /^#define/ { print $2 }' |
        sed 's/(.*//' | sort -u > $checks/macros."${1:-public}"
    [ -s $checks/macros."${1:-public}" ] && ! grep -vxE "$2" $checks/macros."${1:-public}"
}

# A format of state that is asked for is that of all state: the mode that codes it by itself leaves it.
check_state() {
    local said
    build quick build/quick/examples/gpt2 || return 1
    plan() {
        said=$(build/quick/examples/gpt2 --preset 124M --dry --plan --offload off --mode aggressive --budget 1700M "$@") &&
            awk '/^8-bit optimizer / { print $3, $NF }' <<< "$said"
    }
    [[ $(plan) != 0\ * && $(plan --state f32) = '0 off' && $(plan --state bf16) = '0 off' &&
        $(plan --state 8bit) = '48 '* ]] || { plan; plan --state f32; plan --state bf16; plan --state 8bit; return 1; }
}

# half is half way from the smallest arena to that of the plan without a budget, which in 16 bits is not the
# plain one.
check_half() {
    local precision
    build quick build/quick/examples/gpt2 || return 1
    for precision in f32 bf16 bf16-alone; do
        build/quick/examples/gpt2 --preset 124M --precision $precision --budget half --dry | awk '
            $1 == "plain" || $1 == "most" { most = $2 } $1 == "smallest" { least = $2 } $1 == "budget" { half = $2 } { print }
            END { off = half - (most + least) / 2; exit !(most > least && off < 0.2 && off > -0.2) }' || return 1
    done
}

# Two ranks train on what one does with twice the accumulation, whatever they divide among them: the losses
# are the same to rounding, and so is that of what is held out.
check_ranks() { # BATCHES OF A STEP AND RANK, PROGRAM, ARGUMENTS
    local batches=$1 program=$2 log=$checks/ranks_$1_${2//\//_} level
    shift 2
    [ -n "$MPI" ] || skip 'no MPI'
    set -- --preset tiny --sequence 16 --batch 2 --steps 20 --every 1 --budget 40M "$@" README.md
    losses() { awk '$1 == "step" { print $2, $5 } $1 == "held" { print $1, $4 }'; }
    run_mpi 1 $program --accumulate $((2 * batches)) "$@" > $log.out || { tail -n 1 $log.out; return $(($? == 77 ? 77 : 1)); }
    losses < $log.out > $log
    for level in off state gradients values; do
        run_mpi 2 $program --accumulate $batches --shard $level --trace $log.trace --metrics $log.metrics \
            "$@" | losses > $log.2 || return 1
        grep -q '"simulated, rank 0 of 2"' $log.trace && grep -q '"pid":3,.*"simulated, rank 1 of 2"' $log.trace.1 &&
            grep -q '^memscale_rank 1$' $log.metrics.1 && grep -q '^memscale_ranks 2$' $log.metrics || return 1
        paste $log $log.2 | awk -v level=$level '
            { off = $2 - $4 } $1 != $3 || off > 0.0011 || off < -0.0011 { print level ": " $0; wrong = 1 }
            END { exit wrong || NR < 10 }' || return 1
    done
    run_mpi 2 $program "${@/#40M/smallest}" > $log.out || { tail -n 2 $log.out; return 1; } # as a dry run finds it
}

# Weights that examples/llama writes are fine-tuned, written and read again with the loss that they had, in
# F32, and in 16 bits beside what is coded in 8; a wrong file of tokens is an error.
check_finetune() {
    local folder=$checks/finetune run said
    [ -n "${CJSON-}" ] || skip 'no cJSON'
    build quick build/quick/examples/llama && build quick build/quick/bench/finetune && mkdir -p $folder || return 1
    build/quick/examples/llama --preset tiny --steps 20 --write $folder/from --write-type f32 LICENSE > $folder/log ||
        { cat $folder/log; return 1; }
    iconv -f ISO-8859-1 -t UTF-32LE LICENSE > $folder/ids # int32, one a byte
    run="build/quick/bench/finetune --train $folder/ids --held-out $folder/ids --sequence 64 --rate 1e-3"
    losses() {
        said=$($run "$@") && sed -n 's/^held out  loss \([0-9.]*\), then \([0-9.]*\),.*/\1 \2/p' <<< "$said"
    }
    for budget in plain smallest; do
        losses --from $folder/from --budget $budget --write $folder/to || return 1
        losses --from $folder/to --steps 1 || return 1
    done | awk 'NR % 2 { falls += $2 < $1; after = $2; is[NR] = $2 } NR % 2 == 0 { same += $1 == after } { print }
        END { exit !(NR == 4 && falls == 2 && same == 2 && is[1] - is[3] < 1e-4 && is[3] - is[1] < 1e-4) }' || return 1
    losses --from $folder/from --precision bf16 --state 8bit-all --budget smallest |
        awk '{ print } END { exit !(NR == 1 && $2 < $1) }' || return 1
    refuses $run --from $folder/from --steps 99999 && refuses $run --from $folder/from --sequence 99999 &&
        refuses $run --from $folder/from --train LICENSE && refuses $run --from $folder/from --held-out none &&
        refuses $run --from none && refuses $run && refuses $run --from $folder/from --write $folder/to --write-type none &&
        refuses $run --from $folder/from --write none/none
}

# Weights in F32 are lent to adapters in their file, those in 16 bits are not: with the same values, the
# plain arena is smaller by a matrix of a block at least, and what is trained is the same.
check_lending() {
    local folder=$checks/lending llama=build/quick/examples/llama type
    [ -n "${CJSON-}" ] || skip 'no cJSON'
    build quick $llama && rm -rf $folder && mkdir -p $folder || return 1
    $llama --preset tiny --sequence 32 --batch 2 --steps 5 --write $folder/bf16 LICENSE > $folder/log &&
        $llama --from $folder/bf16 --random --sequence 32 --batch 2 --steps 1 --rate 1e-30 --write $folder/f32 \
            --write-type f32 >> $folder/log || { cat $folder/log; return 1; }
    for type in bf16 f32; do
        $llama --from $folder/$type --random --sequence 32 --batch 2 --rank 4 --steps 6 --metrics $folder/$type.txt \
            --write $folder/to-$type --write-type f32 > $folder/log || { cat $folder/log; return 1; }
        awk '$1 == "memscale_plain_arena_bytes" { print $2 }' $folder/$type.txt
    done > $folder/arenas
    cmp $folder/to-bf16/model.safetensors $folder/to-f32/model.safetensors &&
        awk '{ is[NR] = $1 } END { exit !(NR == 2 && is[1] - is[2] > 4 * 32 * 96) }' $folder/arenas ||
        { cat $folder/arenas; return 1; }
}

check_figures() {
    local program
    for program in bench/workloads examples/estimate examples/gpt2; do
        build quick build/quick/$program || return 1
    done
    tests/figures.sh build/quick
}

# In a fresh checkout, with a stand-in for the compilers: what the makes for a GPU build is built once,
# whatever is asked for before it and by however many jobs.
check_gpu_builds() {
    local fresh=$checks/fresh stub=$PWD/tests/stub_compiler.sh made goal
    rm -rf $fresh $checks/made.txt && mkdir -p $fresh && cp -r Makefile memscale.h bench examples tests $fresh ||
        return 1
    for goal in gpu-build 'config=quick cuda-tests' cuda gpu-build build/tests/test_api build/examples/estimate \
        build/examples/gpt2 build/tests/test_api 'config=quick build/quick/cuda/bench/gpu'; do
        MADE=$PWD/$checks/made.txt $MAKE -s -j2 -C $fresh CC=$stub CXX=$stub NVCC=$stub CUDA_CODES=sm_90 $goal \
            > $checks/fresh.log 2>&1 || { cat $checks/fresh.log; return 1; }
    done
    made=$(sed 's/\.[0-9]*$//' $checks/made.txt | sort)
    [ -z "$(uniq -d <<< "$made")" ] || { echo "built twice: $(uniq -d <<< "$made")"; return 1; }
    for goal in build/cuda/cuda.o build/cuda/bench/gpu build/quick/cuda/bench/gpu build/cuda/examples/lora \
        build/quick/cuda/tests/test_api build/quick/cuda/tests/test_cuda_kernels; do
        grep -qx $goal <<< "$made" || { echo "not built: $goal"; return 1; }
    done
}

# Without a GPU they say what is missing, before they build anything.
check_gpu_missing() {
    local goal text status
    ! tests/gpu.sh has-gpu > /dev/null || skip 'a GPU is here'
    for goal in gpu-first test-gpu bench-gpu; do
        text=$($MAKE -s NVCC=/no/nvcc CUDA_CODES=sm_90 $goal 2>&1)
        status=$?
        [ $status -ne 0 ] && grep -q 'no NVIDIA GPU here' <<< "$text" && grep -q gpu-build <<< "$text" &&
            ! grep -q '/no/nvcc' <<< "$text" || { echo "$goal: $status, $text"; return 1; }
    done
    text=$(bench/gpu_first.sh build/none 2>&1)
    [ $? -eq 2 ] && grep -q 'build/none is missing' <<< "$text" || { echo "$text"; return 1; }
}

# What make test-gpu runs, on the emulated GPU: tests that pass, fail and are missing are counted.
check_gpu_tests() {
    local folder=$checks/gpu text
    build release build/emulated/bench/gpu && build release build/emulated/tests/test_cuda_graphs || return 1
    mkdir -p $folder/tests $folder/bench && ln -sf $PWD/build/emulated/bench/gpu $folder/bench &&
        ln -sf $PWD/build/emulated/tests/test_cuda_graphs $folder/tests || return 1
    printf '#!/bin/sh\necho an error here; exit 3\n' > $folder/tests/test_fails && chmod +x $folder/tests/test_fails
    text=$(COMPUTE_SANITIZER=none tests/gpu.sh $folder test_cuda_graphs) &&
        grep -qE '^[1-9][0-9]* passed, 0 failed, 2 skipped$' <<< "$text" || { echo "$text"; return 1; }
    ! text=$(COMPUTE_SANITIZER=none tests/gpu.sh $folder test_cuda_graphs test_fails test_missing) &&
        grep -q '^      an error here' <<< "$text" &&
        grep -qE '^[1-9][0-9]* passed, 2 failed, 2 skipped$' <<< "$text" || { echo "$text"; return 1; }
}

# The page of make gpu-first, on the emulated GPU: it has all parts, each row of a table has the cells of
# its head, and bits are the same. With no time, all parts are left out.
check_gpu_first() {
    local page=build/emulated/gpu-first.md part
    build release build/emulated/bench/gpu || return 1
    GPU_TINY=1 GPU_SECONDS=900 bench/gpu_first.sh build/emulated/bench/gpu > /dev/null || { cat $page; return 1; }
    for part in 'to the device' adamw_8bit '124M logits of 50,304 | tf32' 'bert-tiny | smallest | tf32 | graph' \
        'bf16 | plain | stream' 'bf16 | plain | graph' 'bf16 | 1/2, recomputed' 'bf16 | 1/3, offloaded' \
        'tf32 | 1/2, recomputed' 'attention, backward' 'all products' 'gpt2-tiny | 1000 | 16000' '^## PyTorch'; do
        grep -q "$part" $page || { echo "no row: $part"; return 1; }
    done
    awk -F '|' '/^## / { title = $0 } !/^\|/ { cells = 0; next }
        !cells { cells = NF } NF != cells || /\| (NO|nan|inf|-nan) \|/ { wrong = 1; print title ": " $0 }
        END { exit wrong }' $page || return 1
    ! grep -E '^(Failed|Stopped|Left out)' $page || return 1
    GPU_TINY=1 GPU_SECONDS=1 bench/gpu_first.sh build/emulated/bench/gpu > /dev/null &&
        [ "$(grep -c '^Left out for want of time' $page)" -ge 6 ]
}

# --help of every program lists each of its options on standard output and does nothing else; an option
# that there is not is an error, with the usage on standard error.
check_help() {
    local source program name option out=$checks/help.out err=$checks/help.err status=0
    $MAKE -s --no-print-directory werror=1 config=quick all || return 1
    wrong() {
        echo "$name $*"
        status=1
    }
    for source in examples/*.c examples/*.cpp examples/*/main.c bench/*.c; do
        program=${source%/main.c} program=build/quick/${program%.*} name=$(basename "$program")
        [ -x "$program" ] || continue
        timeout 20 "$program" --help > "$out" 2> "$err" && [ ! -s "$err" ] &&
            grep -q "^usage: .*$name" "$out" || wrong --help
        for option in $(sed -n 's/^.*{"\(--[a-z0-9=-]*\)",.*$/\1/p' ${source/%main.c/*.[ch]}); do
            grep -q -e "^  $option " "$out" || wrong "does not list $option"
        done
        timeout 20 "$program" --no-such-option > "$out" 2> "$err"
        [ $? -eq 2 ] && [ ! -s "$out" ] && grep -q "^usage: .*$name" "$err" &&
            grep -q -e --no-such-option "$err" || wrong --no-such-option
    done
    for source in bench/*.py; do
        command -v python3 > /dev/null || break
        name=$(basename "$source")
        python3 -B "$source" --help | grep -q "^usage: $name" || wrong --help
        ! python3 -B "$source" --no-such-option > "$out" 2> "$err" && [ ! -s "$out" ] &&
            grep -q "^usage: $name" "$err" || wrong --no-such-option
    done
    return $status
}

# What several programs have means the same in each.
check_shared_options() {
    local tiny='--preset tiny --random --steps 1' command program value status=0
    for command in "examples/gpt2 $tiny" "examples/bert $tiny" 'examples/cnn --width 4 --test 10 --steps 1' \
        'examples/llmc_style --size tiny --steps 1' 'examples/darknet_style --batch 4 --steps 1'; do
        program=build/quick/$command
        build quick "${program%% *}" || return 1
        for value in smallest half plain 99% 1200M 1.5g; do
            $program --budget $value > $checks/options.out 2>&1 || { echo "$command --budget $value" && status=1; }
        done
        for value in most 0 0% 101% -5M 50%% nan; do
            refuses $program --budget $value || status=1
        done
        for value in 0 -1 1.5 many 1e99; do
            refuses $program --steps $value || status=1
        done
        grep -q '^  --clip X' <<< "$($program --help)" || continue
        $program --clip 0.5 --accumulate 2 > $checks/options.out 2>&1 || { cat $checks/options.out && status=1; }
        for value in '--accumulate 0' '--clip much'; do
            refuses $program $value || status=1
        done
    done
    for command in 'gpt2 --preset none' 'gpt2 --mode none' 'gpt2 --off none' 'gpt2 --offload none' \
        'gpt2 --optimizer none' 'gpt2 --shard none' 'gpt2 --state none' 'gpt2 --precision none' 'gpt2 --sequence 5000' \
        'gpt2 --dropout 1' 'gpt2 --graph' 'gpt2 --device none' 'bert --preset none' 'cnn --offload none' \
        'lora --preset none' 'llama --write none/none' 'llama --write LICENSE' 'llama --from none' 'llama --from docs' \
        'llama --from LICENSE' 'llama --from LICENSE --preset tiny' 'llama --write-type f16' 'llama --prompt' \
        'llama --data' 'llama --base q4_1' 'llama --rank 2 --base none' 'llama --rank 2 --preset tiny --base nf4' \
        'llmc_style --size none' 'darknet_style --batch 9999'; do
        build quick build/quick/examples/${command%% *} && refuses build/quick/examples/$command || status=1
    done
    for command in layout 'layout trace:4' chain 'chain tests/chain.csv much' 'gpu --warmup 65' \
        'overhead --repeats 101' 'update --repeats 101' 'tiles --repeats 65' 'save --rounds 33' \
        'save --preset none' 'slices --preset none' 'predict --steps 33' 'offload --preset none' \
        'timeline --device none' 'timeline --out a.svg b.svg' 'ranks --part none' 'workloads --model none' 'whole --mode none'; do
        build quick build/quick/bench/${command%% *} && refuses build/quick/bench/$command || status=1
    done
    return $status
}

refuses() { # COMMAND: a mistake in it is said in one line, or two, and ends the program with status 2
    timeout 20 "$@" > /dev/null 2> $checks/options.err
    [ $? -eq 2 ] && [ $(wc -l < $checks/options.err) -le 2 ] && grep -q . $checks/options.err ||
        { echo "$*: $(cat $checks/options.err)" && false; }
}

# --debug: says so if a program has no mistake; and the first gradient that is added to what nobody has
# cleared ends one.
check_debug() {
    local command status=0 copy=$checks/debug
    for command in 'minimal' 'nn_minimal' 'gpt2 --preset tiny --sequence 16 --batch 2 --steps 2 LICENSE' \
        'llama --preset tiny --sequence 16 --batch 2 --steps 2 LICENSE' \
        'bert --preset tiny --sequence 16 --batch 2 --steps 2 --dropout 0.1 LICENSE' \
        'cnn --steps 1 --test 4 --batch 4 --width 4' 'lora --steps 1 --sequence 8 --batch 1' \
        'llmc_style --size tiny --steps 2 --compare' 'darknet_style --batch 2 --steps 1' \
        'robot --seconds 3' 'engine --seconds 1 --fast --no-load'; do
        build quick build/quick/examples/${command%% *} || return 1
        build/quick/examples/$command --debug > $copy.out 2>&1 || { cat $copy.out && status=1; }
        [ "${command%% *}" = minimal ] || grep -q '^debug  *every layer does' $copy.out ||
            { echo "$command --debug: nothing is said of it" && status=1; }
    done
    sed 's/call->grad_in\[0\].beta == 0.0f ? 0.0f : grad_in\[i\]/grad_in[i]/' examples/minimal.c > $copy.c
    ! cmp -s $copy.c examples/minimal.c || { echo 'nothing is planted'; return 1; }
    compile ${CC:-cc} $copy.c -o $copy -lm || return 1
    ! $copy --debug > $copy.out 2>&1 && grep -q 'grad_in\[0\].*beta' $copy.out || { cat $copy.out && status=1; }
    return $status
}

export -f check_help check_shared_options refuses check_debug
export -f check_gpu_builds check_gpu_missing check_gpu_tests check_gpu_first

check_page() {
    local program
    for program in examples/estimate bench/timeline; do
        build quick build/quick/$program || return 1
    done
    tests/page.sh build/quick
}

# Python's safetensors writes files that are loaded, and reads what is saved.
check_safetensors() {
    local folder python=${PYTHON:-python3}
    "$python" -c 'import numpy, safetensors' 2> /dev/null || skip 'no safetensors for Python'
    folder=$(mktemp -d $checks/safetensors.XXXXXX)
    build quick build/quick/tests/test_files && "$python" tests/safetensors_files.py write $folder &&
        MEMSCALE_TEST_SAFETENSORS=$folder build/quick/tests/test_files > $folder/log 2>&1 ||
        { cat $folder/log; return 1; }
    "$python" tests/safetensors_files.py read $folder
}

# Models of transformers are read, and what is written of them is the same to it.
check_transformers() {
    local folder python=${PYTHON:-python3}
    "$python" -c 'import torch, transformers' 2> /dev/null || skip 'no transformers for Python'
    [ -n "$CMOCKA" ] && [ -n "${CJSON-}" ] || skip 'no cmocka or no cJSON'
    folder=$(mktemp -d $checks/transformers.XXXXXX)
    build quick build/quick/tests/test_weights && "$python" tests/weights_files.py write $folder &&
        MEMSCALE_TEST_WEIGHTS=$folder build/quick/tests/test_weights > $folder/log 2>&1 ||
        { cat $folder/log; return 1; }
    "$python" tests/weights_files.py read $folder
}

export -f check_transformers
export -f skip need build run_test run_threads run_mpi check_killed run_corpus run_program run_test_with compile check_unplanned
export -f done_for cell compile_nvcc cell_nvcc cell_cuda_object cell_cuda_tests check_cuda_refusal build_cuda
export -f cell_library cell_nccl cell_newest cell_elsewhere cell_msvc cell_mixed cell_cpp cell_sources check_robot check_resume check_safetensors check_dialect
export -f implementation same check_exports check_static_exports imports check_cold macros check_figures check_half check_finetune check_lending check_ranks check_state check_page

# ---- what is checked -----------------------------------------------------------------------------

: > $checks/list

sweeps() { # SOURCE: whether it asks how far to go
    grep -qE 't_sweep|t_stride|t_size|cn_seeds' "$1"
}

# Tests that no device of CUDA's runs, emulated or not.
host_only=" $(sed -n 's/^host_only := //p' tests/emulation.mk) "

# Once in the quick tier, with sanitizers where memory and errors are what is tested: their sweeps are
# longer with sanitizers too. Longer sweeps are of the release configuration: a part of the full ones, which
# MEMSCALE_TEST_SWEEP=100 asks a test program for. As C++11 the tests run on the emulated device, or else
# here.
sanitized=' test_api test_gemm test_layout test_memory test_optimizer test_profile test_validate test_weights '
plans_only=' test_estimate test_rules test_solver ' # of which fuzz_api and others run the code with sanitizers
group 'tests'
for source in tests/test_*.c; do
    name=$(basename "$source" .c)
    case $name in test_cuda*) continue ;; esac
    sanitize="run_test sanitize build/sanitize/tests/$name"
    sweeps "$source" && length=', longer sweeps' || length=
    case $name in
    test_offload) share=40 longer=broad ;; # a wait that is missing shows in few of its graphs
    test_solver) share=30 longer=full ;;
    *) share=50 longer=full ;;
    esac
    if [[ $sanitized == *" $name "* ]]; then
        check quick "$name, sanitizers" "$sanitize"
        [ -z "$length" ] || check full "$name, sanitizers, longer sweeps" "$sanitize 80"
    else
        [[ $plans_only == *" $name "* ]] && tier=full || tier=broad
        check quick "$name" "run_test quick build/quick/tests/$name"
        check $tier "$name, sanitizers" "$sanitize"
    fi
    check $longer "$name, release$length" "run_test release build/tests/$name $share"
    [[ $host_only != *" $name "* ]] || check full "$name, C++11" "run_test release build/tests/${name}_cpp"
done
check quick 'test_formats, MEMSCALE_NO_STDIO' 'run_test_with -DMEMSCALE_NO_STDIO tests/test_formats.c'
check quick 'test_slices, MEMSCALE_NO_SYSTEM' 'run_test_with -DMEMSCALE_NO_SYSTEM tests/test_slices.c'
check broad 'test_elastic, MEMSCALE_NO_SYSTEM' 'run_test_with -DMEMSCALE_NO_SYSTEM tests/test_elastic.c'
check quick 'test_saved_plans, MEMSCALE_NO_PLANNER' check_unplanned
check broad 'test_profile, MEMSCALE_NO_STDIO' 'run_test_with -DMEMSCALE_NO_STDIO tests/test_profile.c'
check quick 'test_threads, thread sanitizer' 'run_threads build/thread/tests/test_threads'
check full 'test_threads, thread sanitizer, full sweeps' 'run_threads build/thread/tests/test_threads 100'
check full 'test_recipes, thread sanitizer' 'run_threads build/thread/tests/test_recipes'
check broad 'test_offload, thread sanitizer' 'MEMSCALE_TEST_DAGS=20 run_threads build/thread/tests/test_offload'
check broad 'test_ranks_faults, thread sanitizer' 'MEMSCALE_TEST_DAGS=8 run_threads build/thread/tests/test_ranks_faults'
check broad 'test_ranks, thread sanitizer' 'MEMSCALE_TEST_DAGS=3 run_threads build/thread/tests/test_ranks'
check broad 'test_comm, thread sanitizer' 'run_threads build/thread/tests/test_comm'
check quick 'mpi_comm, 2 ranks' 'run_mpi 2 build/quick/tests/mpi_comm serialized'
check broad 'mpi_comm, 4 ranks' 'run_mpi 4 build/quick/tests/mpi_comm multiple'
check broad 'mpi_comm, 3 ranks on the thread that calls' 'run_mpi 3 build/quick/tests/mpi_comm single'
check quick 'a rank of MPI is killed' 'check_killed killed 2'
check broad 'a rank of MPI sleeps' 'check_killed asleep 3'
check broad 'mpi_comm, in pieces' 'run_mpi 3 build/quick/tests/mpi_comm_pieces serialized'
check quick 'fuzz_api on tests/corpus, sanitizers' 'run_corpus build/sanitize/tests/fuzz_api tests/corpus'
check quick 'fuzz_load on tests/corpus_load, sanitizers' 'run_corpus build/sanitize/tests/fuzz_load tests/corpus_load'
check quick 'fuzz_weights on tests/corpus_weights, sanitizers' 'run_corpus build/sanitize/tests/fuzz_weights tests/corpus_weights'
check quick 'files and safetensors of Python' check_safetensors
check broad 'weights of transformers' check_transformers
check broad 'runs that are killed while they save' 'build release build/tests/kill_saves && build/tests/kill_saves 100'
check quick 'all as C++11, without code' check_dialect

# As trainers are often built: the compiler is told that no number is infinite or NaN, may regroup sums,
# and the processor flushes subnormal numbers to zero. Most of all that matters to what computes.
computes=' test_api test_contract test_debug test_gemm test_half test_nn test_offload test_optimizer test_simulate test_state test_verify '
group 'tests, -Ofast'
for source in tests/test_*.c; do
    name=$(basename "$source" .c)
    case $name in
    test_cuda*) continue ;;
    test_darknet_style | test_llmc_style)
        check quick "$name" "run_test fast build/fast/tests/$name"
        check full "$name, C++11" "run_test fast build/fast/tests/${name}_cpp"
        check broad "$name, clang" "run_test fast_clang build/fast_clang/tests/$name"
        ;;
    *)
        [[ $computes == *" $name "* ]] && tier=broad || tier=full
        check $tier "$name" "run_test fast build/fast/tests/$name"
        ;;
    esac
    [[ $computes != *" $name "* ]] ||
        check full "$name, clang, C++11" "run_test fast_clang build/fast_clang/tests/${name}_cpp"
done

# The tests on the CUDA backend and a GPU that is emulated, and where they have most kernels with the finder
# of races in these.
raced=' test_half test_nn '
emulated_first=' test_api test_contract test_gemm test_layout test_memory test_optimizer test_verify '
group 'tests, emulated CUDA'
for source in tests/test_*.c; do
    name=$(basename "$source" .c)
    [[ $host_only != *" $name "* ]] || continue
    emulate="run_test release build/emulated/tests/$name"
    case $name in
    test_cuda*) tier=quick ;;
    test_plan) tier=full ;; # its sweeps compare plans, which are the same on every backend
    *)
        tier=broad
        [[ $plans_only$raced != *" $name "* ]] || tier=full
        [[ $emulated_first != *" $name "* ]] || tier=quick
        ;;
    esac
    check $tier "$name" "$emulate"
    [[ $raced != *" $name "* ]] ||
        check broad "$name, races in kernels" "run_test release build/emulated/races/tests/$name"
    ! sweeps "$source" || check full "$name, longer sweeps" "$emulate 40"
done
for source in tests/emulation/test_*.cpp; do
    name=$(basename "$source" .cpp)
    case $name in
    test_races) check broad "$name" "run_test release build/emulated/races/$name" ;;
    test_nn_groups) check broad "$name" "run_test release build/emulated/tests/emulation/$name" ;;
    *) check quick "$name" "run_test release build/emulated/tests/emulation/$name" ;;
    esac
done

group 'emulated CUDA, sanitizers'
for name in test_cuda_backend test_cuda_graphs test_cuda_kernels emulation/test_emulation; do
    check broad "${name#*/}" "run_test sanitize build/sanitize/emulated/tests/$name"
done

# Each cell checks flags and what the preprocessor makes of them; the first has the warnings that the
# optimizer finds, so that others can do without it.
program=tests/compile_program.c
body=-DMEMSCALE_IMPLEMENTATION
hostile='-include tests/windows_macros.h'
for compiler in gcc clang g++ clang++; do
    case $compiler in
    *++) dialect=c++17 newest=c++20 cuda=examples/cuda.cu ;;
    *) dialect=c11 newest=c2x cuda= ;;
    esac
    [ $compiler = gcc ] && tier=quick || tier=broad
    plain="cell $compiler -O0"
    group "compile, $compiler"
    check $tier 'one translation unit' "cell $compiler $body $program"
    [ $compiler = gcc ] || check quick 'one translation unit, -O0' "$plain $body $program"
    check broad "two translation units, ${dialect^^}" \
        "$plain -std=$dialect $program tests/compile_implementation.c"
    check $tier 'with the macros of other headers' \
        "$plain $hostile $program tests/compile_implementation.c"
    check broad 'bodies at a second include' "$plain -DCOMPILE_LATE $program"
    check broad 'MEMSCALE_STATIC' "$plain $body -DMEMSCALE_STATIC $program"
    check broad 'MEMSCALE_STATIC, twice' \
        "$plain $body -DMEMSCALE_STATIC $program tests/compile_static.c"
    check broad 'MEMSCALE_CBLAS' \
        "cell_library $compiler CBLAS '$CBLAS' -O0 $body -DMEMSCALE_CBLAS $program -x none"
    check broad 'MEMSCALE_MPI' \
        "cell_library $compiler MPI '$MPI' -O0 $body -DMEMSCALE_MPI $program -x none"
    check full 'OpenMP, -O2' "cell_library $compiler OpenMP '$OPENMP' $body -O2 $program"
    check full 'MEMSCALE_ASSERT, -O3' "cell $compiler $body -include tests/asserts.h -O3 $program"
    check broad 'MEMSCALE_NO_STDIO' "$plain $body -DMEMSCALE_NO_STDIO $program"
    check broad 'MEMSCALE_NO_SYSTEM' "$plain $body -DMEMSCALE_NO_SYSTEM $program"
    for also in '' -DMEMSCALE_NO_STDIO -DMEMSCALE_NO_SYSTEM -DMEMSCALE_STATIC; do
        check broad "MEMSCALE_NO_PLANNER $also" "$plain $body -DMEMSCALE_NO_PLANNER $also $program"
    done
    check $tier 'examples and benchmarks' "cell_sources $compiler"
    check broad "one translation unit, ${newest^^}" "cell_newest $compiler $newest $program $cuda"
    check full "examples and benchmarks, ${newest^^}" "cell_newest $compiler $newest examples/*.c examples/*/main.c bench/*.c"
done
group 'compile, both languages'
check broad 'MEMSCALE_NCCL, the header of NCCL' cell_nccl
check broad 'g++ on an object of gcc' 'cell_mixed gcc g++'
check broad 'clang++ on an object of clang' 'cell_mixed clang clang++'

check quick 'test_cpp, g++ without exceptions and RTTI' 'cell_cpp gcc g++ "-fno-exceptions -fno-rtti"'
check broad 'test_cpp, clang++ without exceptions and RTTI' \
    'cell_cpp clang clang++ "-fno-exceptions -fno-rtti"'
check broad 'test_cpp, with exceptions and sanitizers' 'cell_cpp gcc g++ -fsanitize=address,undefined'

group 'other machines'
windows='cell_elsewhere wine x86_64-w64-mingw32'
arm='cell_elsewhere qemu-aarch64 aarch64-linux-gnu'
check broad 'Windows, one translation unit' "$windows-gcc $body $program"
check broad 'Windows, C++11' "$windows-g++ '$body -Wno-missing-field-initializers' $program"
check broad 'Windows, examples/llmc_style' \
    "$windows-gcc -O2 examples/llmc_style.c --size tiny --steps 2 --compare --budget 300K"
check broad 'Windows, what the system tells' "$windows-gcc '' tests/compile_host.c"
check broad "Windows, clang as MSVC, C11" "cell_msvc '-x c -std=c11' $body $program"
check broad "Windows, clang as MSVC, C++14" "cell_msvc '-x c++ -std=c++14 -fno-exceptions' $body $program"
check broad "Windows, clang as MSVC, what the system tells" "cell_msvc '-x c -std=c11' tests/compile_host.c"
check broad 'aarch64, one translation unit' "$arm-gcc $body $program"
check broad 'aarch64, examples/llmc_style' \
    "$arm-gcc -O2 examples/llmc_style.c --size tiny --steps 2 --compare --budget 300K"
check broad 'aarch64, what the system tells' "$arm-gcc '' tests/compile_host.c"
check broad 'aarch64, examples/robot' "$arm-gcc -O2 examples/robot.c --seconds 12"
riscv='cell_elsewhere qemu-riscv64 riscv64-linux-gnu'
check broad 'riscv64, one translation unit' "$riscv-gcc $body $program"
check broad 'riscv64, examples/robot' "$riscv-gcc -O2 examples/robot.c --seconds 12"
arm32='cell_elsewhere qemu-arm arm-linux-gnueabihf'
check broad '32-bit ARM, one translation unit' "$arm32-gcc '$body -O1' $program"
check broad '32-bit ARM, what strict C99 hides without -pthread' \
    "need arm-linux-gnueabihf-gcc; compile arm-linux-gnueabihf-gcc $body -fsyntax-only $program"
check broad 'what the system tells' "cell gcc tests/compile_host.c"

group 'compile, nvcc'
check broad 'CUDA, two translation units' "cell_nvcc -x cu $program tests/compile_implementation.c"
check broad 'CUDA, MEMSCALE_STATIC, twice' \
    "cell_nvcc -x cu $body -DMEMSCALE_STATIC $program tests/compile_static.c"
check broad 'CUDA, C++20' 'CUDA_STD=c++20 compile_nvcc -c examples/cuda.cu -o /dev/null'
check broad 'CUDA, with the macros of other headers' "cell_nvcc -x cu $hostile -DCOMPILE_LATE $program"
check broad 'host code' "cell_nvcc -x c++ $body $program"
check quick 'CUDA, one translation unit with the CUDA part' \
    "cell_nvcc -x cu $body -DMEMSCALE_CUDA_IMPLEMENTATION -DCOMPILE_CUDA $program -lcublas"
check broad 'CUDA, the CUDA part alone, a C program on it' cell_cuda_object
check quick 'the CUDA part without nvcc is refused, with the cure' check_cuda_refusal
check broad 'CUDA, tests with kernels' cell_cuda_tests
[[ $tiers == *' full '* ]] && codes='sm_75 sm_80 sm_86 sm_87 sm_89 sm_90' || codes=sm_90 # these take minutes
check broad "make cuda for $codes, and C programs on it" "build_cuda '$codes'"
check quick 'the makes for a GPU build everything once' check_gpu_builds
check quick 'without a GPU they say what is missing' check_gpu_missing
check broad 'tests/gpu.sh on the emulated GPU' check_gpu_tests

group 'symbols and macros'
check quick 'exports what is declared' check_exports
check broad 'exports nothing with MEMSCALE_STATIC' check_static_exports
check quick 'imports' 'imports "" "clock_gettime fopen vsnprintf"'
check broad 'imports with MEMSCALE_ASSERT' 'imports "-include tests/asserts.h" __assert_fail'
check quick 'imports with MEMSCALE_NO_STDIO' 'imports -DMEMSCALE_NO_STDIO clock_gettime'
check quick 'imports with MEMSCALE_NO_SYSTEM' 'imports -DMEMSCALE_NO_SYSTEM memcpy'
check broad 'imports with MEMSCALE_NO_PLANNER' 'imports -DMEMSCALE_NO_PLANNER "clock_gettime fopen vsnprintf"'
check broad 'imports with MEMSCALE_CBLAS' \
    '[ -n "$CBLAS" ] || skip "no CBLAS"; imports -DMEMSCALE_CBLAS cblas_sgemm'
check broad 'neither planning nor a step is compiled as cold' check_cold
check quick 'macros of the public half' 'macros "" "MEMSCALE_[A-Z0-9_]+|MS_OPTIMIZE|MS_ALL_SLOTS"'
check quick 'macros of the implementation' "macros $body '(MEMSCALE|MSI)_[A-Z0-9_]+|MS_OPTIMIZE|MS_ALL_SLOTS'"
check quick 'a function calls only what is above it' 'tests/source.sh order'
check quick 'the table of contents lists all sections, and none is longer than a room' 'tests/source.sh rooms'
check quick 'no default in a switch over an enum' 'tests/source.sh switches'
check quick 'a technique without its row or its case is an error' 'tests/source.sh new_technique'
check quick 'an op without a case is an error' 'tests/source.sh new_op'
check quick 'an optimizer without its row or its functions is an error' 'tests/source.sh new_optimizer'
check quick 'a format that some place does not know is an error' 'tests/source.sh new_format'
check quick 'an engine without its row is an error; with it, it has instructions, trace and report' \
    'tests/source.sh new_engine'
check quick 'a kernel of nn.h without its functions is an error' 'tests/source.sh new_kernel'
check quick 'listings, trace and metrics know the public half alone' 'tests/source.sh listings'

group 'documents'
for document in memscale.h $(grep -lxE '```c(uda)?' README.md docs/*.md); do
    case $document in memscale.h | README.md | docs/getting-started.md) tier=quick ;; *) tier=broad ;; esac
    check $tier "snippets of $document" "tests/snippets.sh $document"
done
check quick 'README.md shows examples/minimal.c' 'tests/source.sh readme_program'
check quick 'docs/recipes.md shows tests/test_recipes.c' 'tests/source.sh recipes'
check broad 'figures of predictions are those that the programs print' check_figures

group 'installing'
check quick 'versions agree' 'tests/packaging.sh versions'
check quick 'make install, make uninstall' 'tests/packaging.sh install'
check quick 'programs by pkg-config' 'tests/packaging.sh pkgconfig'
check quick 'programs by CMake' 'tests/packaging.sh cmake'
check broad 'programs by CMake, with a CBLAS' 'tests/packaging.sh cblas'
check broad 'programs by pkg-config and CMake, with nvcc' 'tests/packaging.sh cuda'
check quick 'the port for vcpkg, by stand-ins for its functions' 'tests/packaging.sh vcpkg'
check quick 'the recipe for Conan' 'tests/packaging.sh conan'

group 'programs'
check broad 'make gpu-first on the emulated GPU' check_gpu_first
check broad '--help of every program' check_help
check broad 'options that several programs have' check_shared_options
check quick '--debug of every program' check_debug
check quick 'examples/robot: no heap, a power cut and a restart' check_robot
resumed() { # TIER STEPS COMMAND
    check $1 "interrupted, then resumed: ${3#build/}" "check_resume $2 $3"
}
resumed quick 3 'build/quick/examples/gpt2 --preset tiny --steps 6 LICENSE'
resumed broad 3 'build/quick/examples/gpt2 --preset tiny --steps 6 --dropout 0.1 --accumulate 2 --precision f16 LICENSE'
resumed quick 3 'build/quick/examples/bert --preset tiny --steps 6 --dropout 0.1 LICENSE'
resumed quick 3 'build/quick/examples/cnn --steps 6 --test 10 --batch 16'
resumed broad 3 'build/quick/examples/cnn --steps 6 --test 10 --batch 16 --budget smallest --check'
resumed quick 10 'build/quick/examples/lora --steps 20 --sequence 16'
resumed broad 20 'build/quick/examples/engine --steps 40 --fast --no-load --seconds 1000'
resumed broad 3 'build/emulated/examples/gpt2 --device cuda --preset tiny --batch 2 --sequence 16 --steps 6 --graph LICENSE'
check broad 'pages in a browser' check_page
check quick 'examples/gpt2: state in the format that is asked for' check_state
check quick '--budget half' check_half
check quick 'bench/finetune: what is written is what was trained' check_finetune
check quick 'examples/llama: lent weights train as others do' check_lending
check quick 'examples/gpt2: two ranks, and one with twice the batches' 'check_ranks 1 build/quick/examples/gpt2'
check broad 'examples/gpt2: two ranks that accumulate, clip and drop' \
    'check_ranks 2 build/quick/examples/gpt2 --clip 0.5 --dropout 0.1 --mode aggressive'
check broad 'examples/gpt2: two ranks with an emulated GPU each' \
    'check_ranks 1 build/emulated/examples/gpt2 --device cuda'
check broad 'examples/bert: two ranks' 'check_ranks 1 build/quick/examples/bert --precision f16'
check broad 'examples/llama: two ranks' 'check_ranks 1 build/quick/examples/llama --precision bf16 --mode aggressive'
while read -r tier line; do
    name=${line%% =>*} name=${name#build/}
    check $tier "${name#quick/}" "run_program '$line'"
done < <(grep -v '^#' tests/programs.txt)

# ---- run and report ------------------------------------------------------------------------------

run_check() { # NUMBER
    local log=$checks/$1.log status
    TIMEFORMAT='%U %S'
    { time timeout 1200 bash -c "$(sed -n "$1p" $checks/list | cut -f 2)" > "$log" 2>&1; } 2> $checks/$1.time
    status=$?
    awk '{ printf "%.1f\n", $1 + $2 }' $checks/$1.time > $checks/$1.seconds
    echo $status > "$checks/$1.tmp"
    mv "$checks/$1.tmp" "$checks/$1.status"
}
export -f run_check

count=$(wc -l < $checks/list)
[ "$count" -gt 0 ] || { echo "no group has \"$only\" in its name"; exit 1; }
# What several checks would otherwise build at the same time.
build release build/private/private.h
build release build/private/bodies.h
needed() { grep -q "$1" $checks/list; }
for config in quick sanitize thread fast fast_clang; do
    ! needed "build/$config/" || build $config build/$config/library.o
done
! needed 'build/tests/\|build/bench/nets' || build release build/library.o
! needed 'build/tests/.*_cpp' || build release build/library_cpp.o
! needed 'build/examples/\|build/bench/' || build release build/memscale.o
! needed 'build/emulated/\|cuda\.md' || build release build/emulated/cuda.a
! needed 'emulated/races' || build release build/emulated/races/races.o
! needed 'sanitize/emulated' || build sanitize build/sanitize/emulated/cuda.a
seq "$count" | xargs -P "$(nproc)" -I{} bash -c 'run_check {}' &
runner=$!
trap 'kill $runner 2> /dev/null' EXIT

tally() { # LOG WORD: the sum of cmocka's summary lines
    awk -v word="$2" 'index($0, "[  " word) == 1 && /test\(s\)/ {
        sub(/^[^]]*\] /, ""); sum += $1 } END { print sum + 0 }' "$1"
}

explain() { # LOG: the lines that say what is wrong, or else the last ones
    { grep -E 'rror|FAILED|SUMMARY' "$1" || tail -n 20 "$1"; } | head -n 20 | sed 's/^/      /'
    printf '      (all of it: %s)\n' "$1"
}

passed=0 failed=0 skipped=0 wrong=()
for number in $(seq "$count"); do
    [ -f $checks/$number.group ] && printf '\n%s\n' "$(cat $checks/$number.group)"
    until [ -f $checks/$number.status ]; do
        kill -0 $runner 2> /dev/null || [ -f $checks/$number.status ] || exit 1
        sleep 0.05
    done
    log=$checks/$number.log
    status=$(cat $checks/$number.status)
    p=$(tally $log PASSED) f=$(tally $log FAILED) s=$(tally $log SKIPPED)
    case $status in
    0) [ $((p + s)) -gt 0 ] || p=1 ;;
    77) s=1 ;;
    *) [ $f -gt 0 ] || f=1 ;;
    esac
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    verdict=ok
    [ $p -le 1 ] || verdict="$p passed"
    [ $s -eq 0 ] || verdict="$s skipped: $(tail -n 1 $log)"
    [ $status -eq 77 ] || [ $s -eq 0 ] || verdict="$p passed, $s skipped"
    [ $f -eq 0 ] || verdict="FAILED"
    seconds=$(cat $checks/$number.seconds)
    name=$(sed -n "${number}p" $checks/list | cut -f 1)
    [ ${#name} -le 56 ] || name="${name:0:53}..."
    printf '  %-56s %-20s %6s s\n' "$name" "$verdict" "$seconds"
    [ $f -eq 0 ] || { explain $log; wrong+=("$number"); }
done

# Once more, for those who see only the end of it.
[ ${#wrong[@]} -eq 0 ] || printf '\nfailed\n'
for number in ${wrong[@]+"${wrong[@]}"}; do
    printf '  %s\n' "$(sed -n "${number}p" $checks/list | cut -f 1)"
    explain $checks/$number.log
done

printf '\nthe slowest, in seconds of processor time\n'
for number in $(seq "$count"); do
    printf '%8s  %s\n' "$(cat $checks/$number.seconds)" "$(sed -n "${number}p" $checks/list | cut -f 1)"
done | sort -rn | head -n 8
wait $runner
times > $checks/times # of a subshell they would be its own
minutes=$(awk 'NR == 2 { split($1 "m" $2, t, "m"); printf "%.1f", t[1] + t[3] + (t[2] + t[4]) / 60 }' $checks/times)
printf 'processor time: %s minutes, in %d:%02d\n' "$minutes" $((SECONDS / 60)) $((SECONDS % 60))

totals=$(printf '%d passed, %d failed, %d skipped' $passed $failed $skipped)
if [ -n "${TOTALS-}" ]; then
    printf '%s\n' "$totals" >> "$TOTALS"
else
    printf '\n%s\n' "$totals"
fi
[ $failed -eq 0 ]
