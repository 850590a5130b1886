/*  mutants.c - linked with what mutants.py builds: which mistake is made, which functions that have one
    are called, and which test of a program is run. */
#include <stdio.h>
#include <stdlib.h>

int msi_mutant;
unsigned char msi_reached[MUTANTS];

extern void cmocka_set_test_filter(const char *pattern) __attribute__((weak));

__attribute__((constructor)) static void choose(void) {
    const char *mutant = getenv("MUTANT"), *filter = getenv("TEST_FILTER");
    msi_mutant = mutant != NULL ? atoi(mutant) : 0;
    if (filter != NULL && filter[0] != 0 && cmocka_set_test_filter != NULL) {
        cmocka_set_test_filter(filter);
    }
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("REACHED");
    FILE *file = path != NULL && path[0] != 0 ? fopen(path, "w") : NULL;
    for (int i = 0; file != NULL && i < MUTANTS; i++) {
        if (msi_reached[i]) {
            fprintf(file, "%d\n", i);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
}
