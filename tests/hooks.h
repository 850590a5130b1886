/*  hooks.h - what tests can put in the place of the platform. The library that tests link (library.c)
    asks these; a test changes them in main, or for as long as it needs to. */
#ifndef HOOKS_H
#define HOOKS_H

#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct t_hooks {
    uint64_t part_bytes; // the parts in which what moves between host and device comes by default
    double (*platform_us)(void);
    int (*format)(char *text, size_t bytes, const char *format, va_list args); // as vsnprintf
    double (*parse)(const char *text, char **end);                             // as strtod
    int (*start_thread)(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *argument); // as pthread_create
} t_hooks;

extern t_hooks t_hook;

#ifdef __cplusplus
}
#endif

#endif // HOOKS_H
