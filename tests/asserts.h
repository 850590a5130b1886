/*  asserts.h - what tests define before memscale.h, so that its own invariants are checked. It is
    included before a test can ask for the functions of POSIX, so it does. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <assert.h>
#define MEMSCALE_ASSERT(x) assert(x)
