/*  asserts.h - what tests define before memscale.h, so that its own invariants are checked. */
#include <assert.h>
#define MEMSCALE_ASSERT(x) assert(x)
