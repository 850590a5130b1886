/*  fuzz.h - run_input, which the file that includes this has before, for a fuzzer (FUZZ_LIBRARY) or for
    a program that runs the files of a corpus. */
#ifndef FUZZ_H
#define FUZZ_H

#ifdef FUZZ_LIBRARY

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    run_input(data, size);
    return 0;
}

#else

/* Runs an input in memory of exactly its size, so that sanitizers see what is read beyond its end. */
static bool fuzz_file(const char *path) {
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "%s cannot be read\n", path);
        return false;
    }
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    uint8_t *exact = (uint8_t *)malloc(size > 0 ? size : 1);
    if (exact == NULL) {
        return false;
    }
    memcpy(exact, data, size);
    run_input(exact, size);
    free(exact);
    return true;
}

/* The exit status. The sum is printed as cmocka does, for tests/run.sh. */
static int fuzz_files(char *const *paths, int count) {
    int run = 0;
    for (int i = 0; i < count; ++i) {
        run += fuzz_file(paths[i]);
    }
    printf("[  PASSED  ] %d test(s).\n", run);
    return run > 0 && run == count ? 0 : 1;
}

#endif // FUZZ_LIBRARY

#endif // FUZZ_H
