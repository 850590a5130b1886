// The one source file of a program that holds the bodies.
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
