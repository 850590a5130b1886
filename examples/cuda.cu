/*  cuda.cu - what of memscale.h and nn.h is for CUDA, for the programs of examples/, which stay C.
    Compiled by nvcc, and linked with cudart and cublas. */
#define MEMSCALE_CUDA_IMPLEMENTATION
#define NN_CUDA_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"
