/*  fuzz_check.h - how the fuzzers end at what must not be: by abort, which clang's fuzzer takes for a
    finding, with the condition and its place. */
#ifndef FUZZ_CHECK_H
#define FUZZ_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            broken(#condition, __FILE__, __LINE__);                                                \
        }                                                                                          \
    } while (0)

static void broken(const char *condition, const char *file, int line) {
    fprintf(stderr, "%s:%d: broken: %s\n", file, line, condition);
    abort();
}

#endif // FUZZ_CHECK_H
