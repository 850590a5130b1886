/*  no_heap.c - linked with -Wl,--wrap=malloc and so on: a program that takes memory from the heap ends
    here. */
#include <stddef.h>
#include <stdlib.h>

void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);

void *__wrap_malloc(size_t bytes) {
    (void)bytes;
    abort();
}

void *__wrap_calloc(size_t count, size_t bytes) {
    (void)count, (void)bytes;
    abort();
}

void *__wrap_realloc(void *memory, size_t bytes) {
    (void)memory, (void)bytes;
    abort();
}
