/*  library.c - memscale.h as tests link it, compiled once for each configuration: its private functions
    are within reach (private.h), and it asks the hooks for what is the platform's. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 // clock_gettime
#endif
#include "hooks.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double platform_us(void) {
    struct timespec now;
    return clock_gettime(CLOCK_MONOTONIC, &now) == 0
               ? 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec
               : 0.0;
}

t_hooks t_hook = {(uint64_t)16 << 20, platform_us, vsnprintf, strtod, pthread_create};

static inline double msi_platform_us(void) {
    return t_hook.platform_us();
}

#define MSI_PLATFORM_US
#define MSI_PART_BYTES t_hook.part_bytes
#define pthread_create t_hook.start_thread
#define vsnprintf      t_hook.format
#define strtod         t_hook.parse
#include "bodies.h"
