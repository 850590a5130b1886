// The CUDA part of memscale.h, which the CMake target memscale::cuda has nvcc compile.
#define MEMSCALE_CUDA_IMPLEMENTATION
#include <memscale.h>
