// The implementation of memscale.h, which the CMake target memscale::memscale compiles.
#define MEMSCALE_IMPLEMENTATION
#include <memscale.h>
