// The one source file of a program that holds the CUDA part.
#define MEMSCALE_CUDA_IMPLEMENTATION
#include "memscale.h"
