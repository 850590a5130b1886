/*  cuda.cu - the CUDA part of memscale.h and the kernels of nn_cuda.h, for the C programs of
    examples/ and bench/. Compiled by nvcc; the programs are linked with it, cudart and cublas. */
#define MEMSCALE_CUDA_IMPLEMENTATION
#define NN_CUDA_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
