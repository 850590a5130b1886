# memscale.h is one header and needs no build. This file builds what stands around it: examples,
# benchmarks and tests. `make help` lists the targets. It asks for GNU make and a C compiler; OpenMP,
# a CBLAS, cJSON, MPI, (for the tests) cmocka and (for NVIDIA GPUs) nvcc are found and used where they are.
#
#   config=release|quick|debug|sanitize|thread|coverage|fast|fast_clang
#                                   release is the default and builds under build/, the others under
#                                   build/<config>/; quick is for tests: the library -O2, they -O1; fast is
#                                   -Ofast, as many trainers are built
#   werror=1                                        warnings are errors
#   V=1                                             show the commands
#   CC, CXX, CFLAGS, LDFLAGS                        as usual; CFLAGS come last and win
#   OPENMP= CBLAS= CJSON= MPI= PNG= SDL=            build without what was found
#   NVCC=/usr/local/cuda/bin/nvcc                   of make cuda, where it is not on the PATH
#   CUDA_CODES="sm_90"                              the machine code that it makes; default: 7.5 to 12.0, or
#                                                   for make gpu-first and the like that of the GPU here
#   GPU_SECONDS=600                                 of make gpu-first
#   ONLY=emulated                                   of make test, test-broad and test-all: the groups
#                                                   with that in the name
#   FUZZ_SECONDS=600 FUZZ_CC=clang                  of make fuzz, fuzz-load and fuzz-weights
#   FUZZ_READER=gguf                                of make fuzz-weights: one reader, of those in tests/fuzz_weights.c
#   MUTANTS=lower MUTANTS_MOST_S=0.3                of make mutants: those in sections with that in the name;
#                                                   by tests that take no longer
#   PREFIX=/usr DESTDIR= includedir= datarootdir= pkgconfigdir= cmakedir=
#                                                   of make install and make uninstall
#   header= OUT=                                    another header than memscale.h, in a folder of its own

config ?= release
header ?= memscale.h
OUT    := build$(patsubst %,/%,$(filter-out release,$(config)))

export WARNINGS   := -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wcast-qual \
                     -Wundef $(if $(werror),-Werror)
export WARNINGS_C := -Wstrict-prototypes -Wmissing-prototypes

release  := -O3 -march=native -fno-math-errno
quick    := -O1 -march=native
debug    := -O0 -g
# -g1: lines for stack traces; where variables are would take longer to compile than the checks. What
# address finds as well need not be looked for twice.
sanitize := -Og -g1 -fsanitize=address,undefined -fno-sanitize=null,object-size \
            -fno-sanitize-recover=all -fno-omit-frame-pointer
thread   := -Og -g1 -fsanitize=thread
coverage := -O0 -g --coverage
fast     := -Ofast -march=native
fast_clang := -O3 -ffast-math -march=native
ifeq ($(config),fast_clang)
CC  := clang
CXX := clang++
endif
ifeq ($($(config)),)
$(error config=$(config) is none of release, quick, debug, sanitize, thread, coverage, fast, fast_clang)
endif

# ---- what this machine has -----------------------------------------------------------------------

quiet_goals := clean format help install uninstall
ifneq ($(filter-out $(quiet_goals),$(or $(MAKECMDGOALS),all)),)

# $(call try,HEADERS,EXPRESSION,FLAGS): FLAGS, if a program with these compiles and links.
hash := \#
try = $(shell mkdir -p build; \
        printf '%s\n' $(1:%='$(hash)include <%>') 'int main(void) { return $(2); }' \
        | $(CC) -x c - -o build/try.$$$$ $(3) 2>/dev/null && echo '$(3)'; rm -f build/try.$$$$)

ifeq ($(origin OPENMP),undefined)
OPENMP := $(call try,omp.h,omp_get_max_threads() < 1,-fopenmp)
endif
ifeq ($(origin CBLAS),undefined)
CBLAS := $(or $(call try,cblas.h,cblas_sgemm == 0,-lopenblas),\
              $(call try,cblas.h,cblas_sgemm == 0,-lcblas))
endif
ifeq ($(origin CMOCKA),undefined)
CMOCKA := $(call try,stdarg.h stddef.h setjmp.h stdint.h cmocka.h,\
            cmocka_set_message_output == 0,-lcmocka)
endif
ifeq ($(origin CJSON),undefined)
CJSON := $(call try,cjson/cJSON.h,cJSON_Parse == 0,-DMODEL_SHAPE_CJSON -lcjson)
endif
ifeq ($(origin NVCC),undefined)
NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(lastword $(wildcard /usr/local/cuda*/bin/nvcc)))
endif
# For examples/engine.cpp, which shows or writes pictures, and for which there may be no C++ compiler.
ifeq ($(origin PNG),undefined)
PNG := $(call try,png.h,PNG_LIBPNG_VER < 0,-DENGINE_PNG -lpng)
endif
ifeq ($(origin SDL),undefined)
SDL := $(call try,SDL2/SDL.h,SDL_WasInit == 0,-DENGINE_SDL -I/usr/include/SDL2 -lSDL2)
endif
# For trainers that mpirun starts, and tests/mpi_comm.c. The compilers of Open MPI and MPICH say what they would add to a command.
ifeq ($(origin MPI),undefined)
MPI := $(patsubst -I%,-isystem%,$(filter -I% -L% -l% -Wl% -pthread,$(shell mpicc -show 2>/dev/null)))
MPI := $(if $(MPI),$(call try,mpi.h,MPI_VERSION < 3,$(MPI)))
endif
has_cxx := $(shell command -v $(CXX) 2>/dev/null)
export OPENMP CBLAS CMOCKA CJSON NVCC PNG SDL MPI

lacks := $(if $(OPENMP),,no OpenMP: one thread only.) \
         $(if $(CBLAS),,no CBLAS (libopenblas-openmp-dev): matrix products several times slower.) \
         $(if $(CMOCKA),,no cmocka (libcmocka-dev): most tests are skipped.) \
         $(if $(CJSON),,no cJSON (libcjson-dev): estimate reads no config.json.) \
         $(if $(MPI),,no MPI (openmpi-bin libopenmpi-dev): trainers run as one rank.) \
         $(if $(NVCC),,no nvcc (CUDA toolkit): nothing is built for a GPU.)
ifeq ($(MAKELEVEL),0)
ifneq ($(strip $(lacks)),)
$(info This machine has $(strip $(lacks)))
endif
endif
endif

# The sanitizers take the other half of the code: no OpenMP, the built-in kernel, and one rank.
ifeq ($(filter sanitize thread,$(config)),)
features := $(OPENMP) $(if $(CBLAS),-DMEMSCALE_CBLAS)
libs     := $(CBLAS)
by_mpi   := $(if $(MPI),$(OUT)/examples/gpt2 $(OUT)/examples/bert $(OUT)/examples/llama)
endif

# MEMSCALE_ASSERT is off unless it is defined: here it is, except in release and fast.
asserts := $(if $(filter release fast fast_clang,$(config)),,-include tests/asserts.h)
common  := $($(config)) $(features) $(WARNINGS) $(asserts) -I. -Iexamples
compile := $(CC) -std=c99 $(WARNINGS_C) $(common) $(CFLAGS)
idioms  := -Wno-missing-field-initializers -Wno-missing-braces -Wno-enum-float-conversion # of C
twin    := $(CXX) -x c++ -std=c++11 $(subst -O3,-O1,$(common)) $(idioms) $(CFLAGS)
libs    += -lm -pthread

# ---- programs ------------------------------------------------------------------------------------

# A program is a file of its name, or a folder of it with a main.c.
programs := $(patsubst %.c,$(OUT)/%,$(wildcard examples/*.c bench/*.c)) \
            $(patsubst %/main.c,$(OUT)/%,$(wildcard examples/*/main.c)) \
            $(OUT)/examples/robot_board $(if $(has_cxx),$(OUT)/examples/engine)
sources  := $(filter-out tests/test_cuda%,$(wildcard tests/test_*.c))
tests    := $(patsubst %.c,$(OUT)/%,$(sources))
twins    := $(addsuffix _cpp,$(tests))

.PHONY: all cuda run cross mutants test test-broad test-all test-gpu gpu-build gpu-first bench-gpu fuzz fuzz-corpus fuzz-load fuzz-load-corpus fuzz-weights fuzz-weights-corpus coverage clean install uninstall format help FORCE
all: $(programs)

say = $(if $(V),,@echo '  $(1)' &&)

# Written beside its place and then moved there, so that two makes at once do not write one file; after a
# failure nothing is there. gcc names the files of coverage after the output.
beside   = $(if $(filter coverage,$(config)),$@,$@.$$$$)
depends  = -MMD -MP -MT $@ -MF $(beside).d
to_place = $(if $(filter coverage,$(config)),,&& mv $(beside) $@ || { rm -f $(beside) $(beside).d $@; false; })
in_place = $(if $(filter coverage,$(config)),,&& mv $(beside).d $@.d $(to_place))

# The implementation is compiled once, not with each program that could hold it: what programs link is
# memscale.o; and tests, which call private functions too, link library.o and include private.h.
$(OUT)/memscale.o: tests/compile_implementation.c $(OUT)/flags
	$(call say,$(CC) $@) $(compile) $(depends) -c -o $(beside) $< $(in_place)

# For programs that can be ranks of an MPI job.
with_mpi := -DMEMSCALE_MPI $(filter -isystem%,$(MPI))
$(OUT)/memscale_mpi.o: tests/compile_implementation.c $(OUT)/flags
	$(call say,$(CC) $@) $(compile) $(once) $(with_mpi) $(depends) -c -o $(beside) $< $(in_place)

# quick: what is compiled once and runs in each test is worth -O2; programs link it too.
once := $(if $(filter quick,$(config)),-O2)

private := $(if $(filter memscale.h,$(header)),build,$(OUT))/private
$(private)/private.h $(private)/bodies.h: $(private)/%.h: tests/private.awk $(header)
	@mkdir -p $(@D)
	@awk $(if $(filter bodies,$*),-v bodies=1) -f $^ > $@.$$$$ && mv $@.$$$$ $@

$(OUT)/library.o $(OUT)/library_cpp.o: tests/library.c $(private)/bodies.h $(OUT)/flags
$(OUT)/library.o:
	$(call say,$(CC) $@) $(compile) $(once) $(on_library) -Wno-missing-prototypes $(depends) -c -o $(beside) $< $(in_place)
$(OUT)/library_cpp.o:
	$(call say,$(CXX) $@) $(twin) $(once) $(on_library) $(depends) -c -o $(beside) $< $(in_place)

on_object  := -DMEMSCALE_IMPLEMENTATION_DONE
on_library := -I$(private) -Itests

on_private := $(tests) $(addprefix $(OUT)/tests/,fuzz_api fuzz_load fuzz_weights) $(patsubst %.c,$(OUT)/%,$(shell grep -l '"private.h"' bench/*.c))
# What a target needs is not for what it is made of: flags would change with the target that asks for them.
$(on_private) $(twins): private on_object = $(on_library)
$(on_private) $(twins): | $(private)/private.h
$(filter-out $(on_private) $(by_mpi) %/engine %/robot_board,$(programs)) $(OUT)/tests/kill_saves: $(OUT)/$(if $(once),library,memscale).o
$(on_private): $(OUT)/library.o
$(twins): $(OUT)/library_cpp.o
$(tests) $(twins): private libs += $(CMOCKA)
$(by_mpi): $(OUT)/memscale_mpi.o
$(by_mpi): private on_object += $(with_mpi)
$(by_mpi): private libs += $(filter-out -isystem%,$(MPI))
reads_json := examples/estimate bench/ranks examples/llama bench/finetune tests/fuzz_weights \
              $(foreach t,test_estimate test_model_config test_weights,tests/$t tests/$(t)_cpp)
$(reads_json:%=$(OUT)/%): private libs += $(CJSON)

program = $(compile) $(on_object) $(depends) -o $(beside) $< $(filter %.o,$^) $(LDFLAGS) $(libs) $(in_place)
$(OUT)/%: %.c $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(program)

$(OUT)/%: %/main.c $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(program)

$(OUT)/%_cpp: %.c $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(twin) $(on_object) $(depends) -o $(beside) $< -x none $(filter %.o,$^) $(LDFLAGS) $(libs) $(in_place)

# Each holds the implementation; in the second what MPI cannot count in one call begins at 1,000 elements.
mpi_programs := $(addprefix $(OUT)/tests/,mpi_comm mpi_comm_pieces mpi_killed)
$(OUT)/tests/mpi_comm_pieces: private CFLAGS += -DMSI_MPI_MOST=1000
$(OUT)/tests/mpi_comm $(OUT)/tests/mpi_comm_pieces: tests/mpi_comm.c
$(OUT)/tests/mpi_killed: tests/mpi_killed.c
$(mpi_programs): $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(compile) $(depends) -o $(beside) $(filter %.c,$^) $(LDFLAGS) $(libs) $(MPI) $(in_place)

# It has a job system of its own.
engine = $(CXX) -std=c++11 $(filter-out -fopenmp -DMEMSCALE_CBLAS,$(common)) $(idioms) $(CFLAGS)
$(OUT)/examples/engine: examples/engine.cpp $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(engine) $(depends) -o $(beside) $< $(PNG) $(SDL) $(LDFLAGS) -lm -pthread $(in_place)

# For a board: the same program without the planner, by a plan that the other one saves.
board := -Os -ffunction-sections -fdata-sections -Wl,--gc-sections -DMEMSCALE_NO_PLANNER
$(OUT)/examples/robot_board: examples/robot.c $(OUT)/flags
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(CC) -std=c99 $(WARNINGS_C) $(filter-out -fopenmp -DMEMSCALE_CBLAS,$(common)) $(CFLAGS) \
	 $(board) $(depends) -o $(beside) $< $(LDFLAGS) -lm -pthread $(in_place)

# Changes when the commands do, so that a new compiler, flag or library rebuilds everything.
$(OUT)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(compile) $(twin) $(LDFLAGS) $(libs) $(CMOCKA) $(CJSON) $(MPI)' | cmp -s - $@ || \
	 echo '$(compile) $(twin) $(LDFLAGS) $(libs) $(CMOCKA) $(CJSON) $(MPI)' > $@

-include $(wildcard $(OUT)/*.d $(OUT)/*/*.d)

# ---- for the GPU, and for the emulation of one -----------------------------------------------------

include tests/emulation.mk

# ---- what to do with them ------------------------------------------------------------------------

run: $(OUT)/examples/gpt2
	@$<

test: tiers := quick
test-broad: tiers := broad
test-all: tiers := quick broad full
test test-broad test-all:
	@ONLY='$(ONLY)' tests/run.sh $(tiers)

# What the tests see of mistakes.
mutants:
	@tests/mutants.py

# Other machines, as far as their compilers are here: Windows (mingw, run by wine), aarch64, riscv64 and
# 32-bit ARM (run by qemu).
cross:
	@ONLY='other machines' tests/run.sh quick broad full

# What is built for the GPU that is here, or for CUDA_CODES where these are given; by as many jobs as there
# are processors, unless -j says how many.
jobs       = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(or $(shell nproc 2>/dev/null),2))
gpu_codes  = $(or $(if $(filter file,$(origin CUDA_CODES)),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
             sed -n 's/^\([0-9]*\)\.\([0-9]*\)$$/sm_\1\2/p' | sort -u)),$(CUDA_CODES))
make_cuda  = $(MAKE) --no-print-directory $(jobs) CUDA_CODES='$(gpu_codes)'

.PHONY: need-gpu
need-gpu:
	@tests/gpu.sh has-gpu

test-gpu: need-nvcc need-gpu
	@[ -n '$(CMOCKA)' ] || { echo 'make test-gpu needs cmocka (libcmocka-dev)'; exit 1; }
	+-@$(make_cuda) -k config=quick cuda-tests
	@CUDA_HOME='$(cuda_home)' tests/gpu.sh build/quick/cuda $(notdir $(cuda_tests) $(cuda_kernels))

gpu-build: need-nvcc
	+@$(make_cuda) $(cuda)/bench/gpu $(cuda)/examples/gpt2

# Its ten minutes begin here. Without nvcc, what was built elsewhere is run.
ifneq ($(filter gpu-first,$(MAKECMDGOALS)),)
export GPU_STARTED := $(shell date +%s)
endif
gpu-first: need-gpu
	+@$(if $(NVCC),$(make_cuda) $(cuda)/bench/gpu,:)
	@bench/gpu_first.sh $(cuda)/bench/gpu

bench-gpu: need-nvcc need-gpu
	+@$(make_cuda) $(cuda)/bench/gpu
	@bash -o pipefail -c '$(cuda)/bench/gpu --part executor,kernels,workloads | tee $(cuda)/bench/gpu.txt'
	@if python3 -c 'import torch' 2> /dev/null; then \
	   bash -o pipefail -c 'python3 bench/gpu_pytorch.py | tee $(cuda)/bench/gpu_pytorch.txt'; \
	 else echo 'python3 has no torch here: bench/gpu_pytorch.py is left out'; fi

# Random sequences of calls, for ten minutes. The corpus grows in build/fuzz; fuzz-corpus makes the
# small one of the tests of it: the longest of those that together reach all that is reached. The same
# of files that ms_load reads, and of published weights and tokenizers: what is written for fuzz_load and
# fuzz_weights to begin with, and as small as it gets.
FUZZ_SECONDS ?= 600
FUZZ_CC      ?= clang
FUZZ_FLAGS   := -timeout=20 -print_final_stats=1 -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/findings/
CALLS_FLAGS  := -max_len=600 -len_control=20
FILES_FLAGS  := -max_len=8192 -len_control=0 -rss_limit_mb=3000

build/fuzz/fuzz_weights: private on_library += -Iexamples
build/fuzz/fuzz_weights: private LDFLAGS += $(CJSON)
build/fuzz/fuzz_api build/fuzz/fuzz_load build/fuzz/fuzz_weights: build/fuzz/%: tests/%.c tests/library.c $(private)/bodies.h $(private)/private.h $(wildcard examples/*.h tests/*.h)
	@mkdir -p build/fuzz/corpus build/fuzz/corpus_load build/fuzz/corpus_weights build/fuzz/findings
	@echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }' \
	 | $(FUZZ_CC) -x c - -fsanitize=fuzzer -o build/fuzz/trial 2> /dev/null || \
	 { echo 'make fuzz needs clang with its fuzzer library (clang, libclang-rt-dev)'; exit 1; }
	$(call say,$(FUZZ_CC) $@) $(FUZZ_CC) -std=c99 $(WARNINGS_C) $(WARNINGS) -I. -O1 -g -DFUZZ_LIBRARY \
	 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(on_library) -Wno-missing-prototypes $(CFLAGS) -o $@ $< tests/library.c $(LDFLAGS) -lm -pthread

fuzz: build/fuzz/fuzz_api
	@$< $(FUZZ_FLAGS) $(CALLS_FLAGS) build/fuzz/corpus tests/corpus

fuzz-corpus: build/fuzz/fuzz_api
	@rm -rf build/fuzz/small && mkdir -p build/fuzz/small
	@$< -set_cover_merge=1 -use_counters=0 build/fuzz/small tests/corpus build/fuzz/corpus
	@rm -rf tests/corpus && mkdir tests/corpus
	@cd build/fuzz/small && cp $$(ls -S | head -n 60) ../../../tests/corpus

fuzz-load fuzz-weights: fuzz-%: build/fuzz/fuzz_%
	@$< $(FUZZ_FLAGS) $(FILES_FLAGS) build/fuzz/corpus_$* tests/corpus_$*

fuzz-load-corpus fuzz-weights-corpus: fuzz-%-corpus: build/fuzz/fuzz_%
	@rm -rf build/fuzz/small && mkdir -p build/fuzz/small
	@$< -set_cover_merge=1 -use_counters=0 build/fuzz/small tests/corpus_$* build/fuzz/corpus_$*
	@rm -rf tests/corpus_$* && mkdir tests/corpus_$* && cp build/fuzz/small/* tests/corpus_$*

# Line coverage of the headers over all tests, on one thread.
covered := $(patsubst %.c,build/coverage/%,$(sources))
coverage:
	@$(MAKE) --no-print-directory config=coverage OPENMP= $(covered)
	@for t in $(covered); do $$t > $$t.log 2>&1 || echo "$$t failed"; done
	@gcov -n build/coverage/library.gcda build/coverage/tests/*.gcda 2> build/coverage/gcov.log | \
	 awk '/^File .(memscale.h|examples)/ { file = $$2; getline; print file, $$0 }'

clean:
	rm -rf build

# The header, memscale.pc for pkg-config, and a CMake package: docs/packaging/README.md.
PREFIX      ?= /usr/local
prefix       = $(PREFIX)
includedir   = $(prefix)/include
datarootdir  = $(prefix)/share
pkgconfigdir = $(datarootdir)/pkgconfig
cmakedir     = $(datarootdir)/cmake/memscale
install uninstall: export DESTDIR := $(DESTDIR)
install uninstall: export prefix := $(prefix)
install uninstall: export includedir := $(includedir)
install uninstall: export pkgconfigdir := $(pkgconfigdir)
install uninstall: export cmakedir := $(cmakedir)
install uninstall:
	@docs/packaging/install.sh $@

format:
	clang-format -i memscale.h $(wildcard examples/*.[ch] examples/*/*.[ch] bench/*.[ch] tests/*.[ch])

help:
	@echo 'make            every program of examples/ and bench/, at build/<folder>/<name>'
	@echo 'make run        train a small GPT-2 inside a byte budget (about a minute)'
	@echo 'make test       what a commit needs, in about six minutes; the last line has the totals'
	@echo 'make test-broad  what a release needs beside that, in about 17 minutes'
	@echo 'make cross      programs for Windows, aarch64, riscv64 and 32-bit ARM, by wine and qemu'
	@echo 'make test-all   everything that is tested: both, and what is left out there, in two hours'
	@echo 'make cuda       gpt2, bert, llama, cnn, lora and benchmarks for NVIDIA GPUs, at build/cuda/<folder>/<name>'
	@echo 'make test-gpu   the tests on a GPU, with compute-sanitizer where it is found'
	@echo 'make gpu-build  what make gpu-first needs, also where there is nvcc and no GPU'
	@echo 'make gpu-first  all that matters about a GPU in ten minutes, as a page for bench/results'
	@echo 'make bench-gpu  the published models on a GPU, beside PyTorch where it is found'
	@echo 'make mutants    which of the mistakes in tests/mutants the tests do not see; it takes hours'
	@echo 'make fuzz       random sequences of calls for ten minutes, by clang'"'"'s fuzzer'
	@echo 'make fuzz-corpus  the small corpus of the tests anew, from what make fuzz has found'
	@echo 'make fuzz-load  random files to load for ten minutes; fuzz-load-corpus: its small corpus anew'
	@echo 'make fuzz-weights  random files of published weights; fuzz-weights-corpus: its small corpus anew'
	@echo 'make coverage   line coverage of the tests'
	@echo 'make format     clang-format all sources'
	@echo 'make install    memscale.h, memscale.pc and a CMake package below /usr/local; make uninstall removes them'
	@echo 'make clean      remove build/'
	@sed -n 's/^#   /  /p' Makefile
