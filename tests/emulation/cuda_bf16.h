/* For the real nccl.h, which includes this and uses nothing of it. */
