# emulation.mk - of the Makefile: what nvcc compiles for a GPU, and the same sources with the emulation of
# one, which needs neither.

# ---- for the GPU ---------------------------------------------------------------------------------
# One object has all that nvcc compiles. The programs around it are C, and have --device cuda.

CUDA_CODES ?= $(filter sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_120,$(shell $(NVCC) --list-gpu-code))
cuda       := $(OUT)/cuda
cuda_part  := build/cuda# of all configurations
# Tests whose layers are host code: tests/emulation/on_cuda.h gives them to the CUDA backend.
with_trampolines := $(addprefix test_,api contract darknet_style debug declarations evals faults gemm groups \
                      layout llmc_style matrices memory optimizer plan ranks shapes steps threads validate verify waits)
# Tests that have no model on a device of CUDA's, or (test_threads) host callbacks that share one emulated
# device, and would open its memory to one another. On one line, which tests/run.sh reads.
host_only := test_buckets test_fold test_formats test_homes test_host_values test_ranks_calls test_ranks_faults test_ranks_files test_recipes test_solver test_threads test_virtual test_waits test_weights
cuda_home   = $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
cuda_libs   = $(firstword $(wildcard $(cuda_home)/lib64 $(cuda_home)/targets/*/lib $(cuda_home)/lib))
# -Wpedantic and -Wundef are not for what nvcc makes of a source, nor for CUDA's headers.
nvcc_codes  = $(foreach c,$(CUDA_CODES:sm_%=%),-gencode arch=compute_$c,code=sm_$c)
nvcc_ptx    = -gencode arch=compute_90,code=compute_90# for devices that none of the codes is for
nvcc_flags  = -std=c++17 -O3 -lineinfo $(if $(werror),-Werror all-warnings) \
              $(addprefix -Xcompiler ,$(filter-out -Wpedantic -Wundef -Werror,$(WARNINGS))) -I. -Iexamples
cuda_c      = $(compile) -DNN_CUDA -isystem $(cuda_home)/include
cuda_link   = -L$(cuda_libs) -Wl,-rpath,$(cuda_libs) -lcublas -lcudart -lstdc++

# Ranks with a GPU each exchange by NCCL where it is there, and otherwise by MPI and the host.
ifneq ($(NVCC),)
ifeq ($(origin NCCL),undefined)
NCCL := $(call try,nccl.h,NCCL_VERSION_CODE < 21400,-isystem$(cuda_home)/include -lnccl)
endif
endif
cuda_by_mpi := $(patsubst $(OUT)/%,$(cuda)/%,$(by_mpi))
cuda_ranks  := $(with_mpi) $(if $(NCCL),-DMEMSCALE_NCCL)

cuda_programs := $(patsubst %.c,$(cuda)/%,$(wildcard $(addsuffix .c,examples/gpt2 examples/bert examples/llama examples/cnn examples/lora bench/gpu bench/whole bench/finetune)))
cuda_tests    := $(filter-out $(addprefix $(cuda)/tests/,$(host_only)),$(patsubst %.c,$(cuda)/%,$(sources)))
cuda_kernels  := $(patsubst %.c,$(cuda)/%,$(wildcard tests/test_cuda*.c))

cuda: need-nvcc $(cuda_programs)

.PHONY: need-nvcc cuda-tests
need-nvcc:
	@[ -n "$(NVCC)" ] || { echo 'make cuda needs nvcc, of the CUDA toolkit: not on the PATH, and NVCC= is not given'; exit 1; }

$(cuda_part)/cuda.o: examples/cuda.cu $(cuda_part)/flags
	$(call say,nvcc $@) $(NVCC) --threads 0 $(nvcc_flags) $(nvcc_codes) $(nvcc_ptx) $(depends) -c -o $(beside) $< $(in_place)

$(cuda_tests): private cuda_c += -DT_CUDA -D_XOPEN_SOURCE=700 $(if $(filter $(with_trampolines),$(@F)),-include tests/emulation/on_cuda.h)
$(cuda_tests): private libs += $(CMOCKA)
$(cuda_tests): private on_object = $(on_library)
$(cuda_tests): $(OUT)/library.o | $(private)/private.h
$(filter-out $(cuda_by_mpi),$(cuda_programs)): $(OUT)/$(if $(once),library,memscale).o
$(cuda)/memscale_mpi.o: tests/compile_implementation.c $(cuda)/flags.c
	$(call say,$(CC) $@) $(cuda_c) $(once) $(cuda_ranks) $(depends) -c -o $(beside) $< $(in_place)
$(cuda_by_mpi): $(cuda)/memscale_mpi.o
$(cuda_by_mpi): private on_object += $(cuda_ranks)
$(cuda_by_mpi): private libs += $(filter-out -isystem%,$(MPI) $(NCCL))
$(reads_json:%=$(cuda)/%): private libs += $(CJSON)
$(cuda_programs) $(cuda_tests): $(cuda)/%: %.c $(cuda_part)/cuda.o $(cuda)/flags.c
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(cuda_c) $(on_object) $(depends) -o $(beside) $< $(filter %.o,$^) $(LDFLAGS) $(cuda_link) $(libs) $(in_place)

# Tests with kernels of their own.
$(cuda_kernels): $(cuda)/%: %.c $(cuda_part)/cuda.o $(OUT)/library.o $(cuda_part)/flags $(cuda)/flags.c | $(private)/private.h
	@mkdir -p $(@D)
	$(call say,nvcc $@) $(NVCC) $(nvcc_flags) $(nvcc_codes) -DT_CUDA -DNN_CUDA $(on_library) \
	 -MMD -MP -MT $@ -MF $@.d -x cu -c -o $@.o $< && \
	$(CC) $(common) -o $(beside) $@.o $(filter %.o,$^) $(LDFLAGS) $(cuda_link) $(libs) $(CMOCKA) $(to_place)

# All that make test-gpu runs.
cuda-tests: need-nvcc $(cuda_tests) $(cuda_kernels) $(cuda)/bench/gpu

$(cuda_part)/flags: FORCE | need-nvcc
	@mkdir -p $(@D)
	@echo '$(nvcc_flags) $(nvcc_codes)' | cmp -s - $@ || echo '$(nvcc_flags) $(nvcc_codes)' > $@

$(cuda)/flags.c: FORCE | need-nvcc
	@mkdir -p $(@D)
	@echo '$(cuda_c) $(cuda_link) $(libs) $(MPI) $(NCCL)' | cmp -s - $@ || echo '$(cuda_c) $(cuda_link) $(libs) $(MPI) $(NCCL)' > $@

-include $(wildcard $(cuda_part)/*.d $(cuda)/*/*.d)

# ---- for the emulation of a GPU ------------------------------------------------------------------
# The same sources, by the C++ compiler, with tests/emulation in the place of CUDA's headers. The
# emulation and the CUDA part are compiled once. It takes the other half of the code: no OpenMP, and
# the built-in products for what is compared.

emulated       := $(OUT)/emulated
# What is compiled once is faster for it; a test has more to compile than to do.
emulated_release = $(if $(filter $(emulated_tests) %/library.o,$@),-O1,-O2)
emulated_cpp    = $(CXX) -std=c++11 $(or $(filter-out $(release),$($(config))),$(emulated_release)) \
                  -ffp-contract=off $(WARNINGS) -Wno-missing-field-initializers -Itests/emulation -I. -Iexamples $(CFLAGS)
emulated_test   = $(emulated_cpp) $(on_library) -x c++ -DT_CUDA -DNN_CUDA -DMEMSCALE_NCCL -D_XOPEN_SOURCE=700 \
                  $(if $(filter $(with_trampolines),$(@F)),-include tests/emulation/on_cuda.h)
emulated_parts := $(patsubst %,$(emulated)/%.o,cuda library runtime memory fibers cublas nccl)

emulated_tests    := $(patsubst %.c,$(emulated)/%,$(wildcard tests/test_*.c))
emulated_programs := $(patsubst $(cuda)/%,$(emulated)/%,$(cuda_programs))
emulated_own      := $(patsubst %.cpp,$(emulated)/%,$(filter-out %/test_races.cpp,$(wildcard tests/emulation/test_*.cpp)))

# With g++, wide accesses to addresses that are not aligned to them trap.
alignment = $(if $(findstring g++,$(CXX)),$(if $(findstring clang,$(CXX)),,-fsanitize=alignment -fsanitize-undefined-trap-on-error))
$(emulated)/cuda.o: examples/cuda.cu $(emulated)/flags
	$(call say,$(CXX) $@) $(emulated_cpp) $(if $(filter sanitize,$(config)),,$(alignment)) -x c++ -D__CUDACC__=1 $(depends) -c -o $(beside) $< $(in_place)

$(emulated)/library.o: tests/library.c $(private)/bodies.h $(emulated)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_cpp) -include tests/asserts.h $(on_library) -DMEMSCALE_NCCL -x c++ $(depends) -c -o $(beside) $< $(in_place)

$(filter-out %/cuda.o %/library.o,$(emulated_parts)): $(emulated)/%.o: tests/emulation/%.cpp $(emulated)/flags
	$(call say,$(CXX) $@) $(emulated_cpp) $(depends) -c -o $(beside) $< $(in_place)

$(emulated)/nccl.o: private emulated_cpp += $(on_library)
$(emulated)/nccl.o: | $(private)/private.h

# An archive, so that a test can have parts of its own instead.
$(emulated)/cuda.a: $(emulated_parts)
	$(call say,ar $@) ar rcs $(beside) $^ $(to_place)

$(emulated_tests) $(emulated_own): | $(private)/private.h
$(emulated_tests): $(emulated)/%: %.c $(emulated)/cuda.a
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_test) $(depends) -o $(beside) $< -x none $(emulated)/cuda.a \
	 $(LDFLAGS) $(CMOCKA) -lm -pthread $(in_place)

# Ranks with an emulated GPU each, by the emulation of NCCL.
emulated_by_mpi := $(patsubst $(OUT)/%,$(emulated)/%,$(by_mpi))
$(emulated)/memscale_mpi.o: tests/compile_implementation.c $(emulated)/flags
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(CC) -std=c99 $(WARNINGS_C) $(WARNINGS) -O2 -Itests/emulation -I. $(with_mpi) -DMEMSCALE_NCCL \
	 $(CFLAGS) $(depends) -c -o $(beside) $< $(in_place)
$(emulated_by_mpi): $(emulated)/memscale_mpi.o
$(emulated_by_mpi): private on_object += $(with_mpi) -DMEMSCALE_NCCL
$(emulated_by_mpi): private LDFLAGS += $(filter-out -isystem%,$(MPI))
$(emulated_programs): $(emulated)/%: %.c $(emulated)/cuda.a
	@mkdir -p $(@D)
	$(call say,$(CC) $@) $(CC) -std=c99 $(WARNINGS_C) $(WARNINGS) -O1 -Itests/emulation -I. -Iexamples \
	 -DNN_CUDA $(on_object) $(CFLAGS) $(depends) -o $(beside) $< $(filter %.o,$^) $(emulated)/cuda.a $(LDFLAGS) -lstdc++ -lm -pthread $(in_place)

$(emulated_own): $(emulated)/%: %.cpp $(emulated)/cuda.a
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_cpp) $(on_library) -D__CUDACC__=1 $(depends) -o $(beside) $< $(emulated)/cuda.a \
	 $(LDFLAGS) $(CMOCKA) -lm -pthread $(in_place)

# With the finder of races in kernels: these are compiled for the thread sanitizer, all else without.
races := $(emulated)/races
$(races)/cuda.o: examples/cuda.cu $(emulated)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_cpp) $(alignment) -x c++ -D__CUDACC__=1 -fsanitize=thread $(depends) -c -o $(beside) $< $(in_place)

$(races)/test_races.o: tests/emulation/test_races.cpp $(emulated)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_cpp) -D__CUDACC__=1 -fsanitize=thread $(depends) -c -o $(beside) $< $(in_place)

$(races)/races.o: tests/emulation/races.cpp $(emulated)/flags
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_cpp) $(depends) -c -o $(beside) $< $(in_place)

race_parts := $(filter-out %/cuda.o,$(emulated_parts)) $(races)/races.o
$(races)/test_races: $(races)/test_races.o $(race_parts)
	$(call say,$(CXX) $@) $(CXX) -o $(beside) $^ $(LDFLAGS) $(CMOCKA) -lm -pthread $(to_place)

$(patsubst %.c,$(races)/%,$(sources)): $(races)/%: %.c $(races)/cuda.o $(race_parts) | $(private)/private.h
	@mkdir -p $(@D)
	$(call say,$(CXX) $@) $(emulated_test) $(depends) -o $(beside) $< -x none $(races)/cuda.o $(race_parts) \
	 $(LDFLAGS) $(CMOCKA) -lm -pthread $(in_place)

$(emulated)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(emulated_cpp) $(LDFLAGS) $(CMOCKA)' | cmp -s - $@ || echo '$(emulated_cpp) $(LDFLAGS) $(CMOCKA)' > $@

-include $(wildcard $(addsuffix .d,$(addprefix $(emulated)/,* */* */*/* */*/*/*)))

