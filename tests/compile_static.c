// A second translation unit with a private copy of its own: MEMSCALE_STATIC and
// MEMSCALE_IMPLEMENTATION are defined on the command line, for this file and compile_program.c.
#include "memscale.h"

ms_result compile_static(ms_model **model);

ms_result compile_static(ms_model **model) {
    return ms_create(NULL, model);
}
