/* For the real nccl.h, which asks whether it was included. */
#define __CUDA_BF16_TYPES_EXIST__
