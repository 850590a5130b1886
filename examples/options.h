/*  options.h - the command lines of all programs in examples/ and bench/.

    The first part needs C alone. Budgets and offloading are there if memscale.h is included first,
    devices if nn.h is: a program that is compiled with NN_CUDA and linked with examples/cuda.cu also
    runs on a GPU. It may be included once more after these. */
#ifndef MEMSCALE_OPTIONS_H
#define MEMSCALE_OPTIONS_H

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define OPTION_API static __attribute__((unused))
#else
#define OPTION_API static
#endif

typedef enum option_kind {
    OPTION_FLAG,   // bool; takes no argument
    OPTION_COUNT,  // int64_t, from 1
    OPTION_BYTES,  // uint64_t, such as 300M, 1.5G or 24GB (powers of 1024)
    OPTION_REAL,   // float, from 0
    OPTION_BUDGET, // option_budget: such bytes, or a part of what the plain plan takes
    OPTION_TEXT,   // const char *
    OPTION_WORD    // option_words, to which it is added
} option_kind;

/* What a plan may take. Only one of them is not 0; all of them are if none was given. */
typedef struct option_budget {
    uint64_t bytes;
    double share; // of the plain arena
    /* "plain"; "smallest", of any plan; "half", half way from that to the plan without a budget. */
    const char *name;
} option_budget;

/* An option of a program, as its parser reads it and its help shows it. `value` has the default
   first, and then what the command line says; a default of 0 or NULL is not shown. */
typedef struct option_spec {
    const char *name, *argument; // "--steps", "N"
    option_kind kind;
    void *value;
    const char *help; // without the default
} option_spec;

/* How many options an array has. */
#define OPTIONS_IN(specs) ((int)(sizeof(specs) / sizeof(specs)[0]))

/* The words of a command line that are not options, and those of options that add to these. */
typedef struct option_words {
    const char *items[64];
    int count;
} option_words;

/* The name of the program, once its options have been read. */
static char options_program[32];

#define OPTION_ACCUMULATE_HELP "batches of a step, whose gradients are added up"
#define OPTION_CLIP_HELP       "largest norm of all gradients together (no limit)"
#define OPTION_RATE_HELP       "largest learning rate, after it has risen and before it falls"

/* Prints what is wrong, after what has been printed so far. Returns 1. */
OPTION_API int fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "%s%s", options_program, *options_program ? ": " : "");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return 1;
}

OPTION_API bool has_suffix(const char *text, const char *suffix) {
    while (*text && tolower((unsigned char)*text) == tolower((unsigned char)*suffix)) {
        text++;
        suffix++;
    }
    return *text == 0 && *suffix == 0;
}

/* strtod for digits alone: no nan, no inf, no hexadecimal; *end is text if there are none. */
OPTION_API double read_digits(const char *text, char **end) {
    const char *start = text + strspn(text, " +");
    const bool is_decimal = isdigit((unsigned char)*start) || *start == '.';
    const double value = is_decimal ? strtod(start, end) : 0.0;
    if (!is_decimal || strcspn(start, "xX") < (size_t)(*end - start)) {
        *end = (char *)(uintptr_t)text;
    }
    return value;
}

/* A number from 0; below 0 at a mistake. If `scaled`, it may have a unit, in powers of 1024: K, M,
   G or T, in any case, also as in GB or GiB. */
OPTION_API double parse_number(const char *text, bool scaled) {
    static const char *const units[] = {"", "k", "m", "g", "t"};
    char *end, unit[4];
    double value = read_digits(text, &end), scale = 1.0;
    bool known = end != text && *end == 0;
    end += strspn(end, " ");
    for (int i = 0; i < 5 && scaled && !known; i++, scale *= 1024.0) {
        snprintf(unit, sizeof unit, "%sb", units[i]);
        known = (i > 0 && has_suffix(end, units[i])) || has_suffix(end, unit);
        snprintf(unit, sizeof unit, "%sib", units[i]);
        known = end != text && (known || (i > 0 && has_suffix(end, unit)));
        value *= known ? scale : 1.0;
    }
    return known && value >= 0.0 && value < 9e18 ? value : -1.0;
}

/* Reads 300M, 50%, plain, half or smallest. Returns 1 if it is none of them. */
OPTION_API int parse_option_budget(option_budget *budget, const char *text) {
    static const char *const names[] = {"plain", "half", "smallest"};
    const option_budget none = {0, 0.0, NULL};
    char *end;
    *budget = none;
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) {
            budget->name = names[i];
            return 0;
        }
    }
    const double share = read_digits(text, &end);
    if (end != text && strcmp(end, "%") == 0) {
        budget->share = share / 100.0;
        return share > 0.0 && share <= 100.0 ? 0 : 1;
    }
    const double bytes = parse_number(text, true);
    budget->bytes = bytes < 1.0 ? 0 : (uint64_t)bytes;
    return bytes >= 1.0 ? 0 : 1;
}

OPTION_API int add_word(option_words *words, const char *word) {
    if (words->count == OPTIONS_IN(words->items)) {
        return fail("more than %d files", words->count);
    }
    words->items[words->count++] = word;
    return 0;
}

/* Reads the argument of an option; prints the reason and returns 1 if it is wrong. */
OPTION_API int read_option(const option_spec *spec, const char *text) {
    const char *argument = text ? text : "(nothing)";
    const double value = parse_number(argument, spec->kind == OPTION_BYTES);
    switch (spec->kind) {
    case OPTION_COUNT:
        if (value < 1.0 || value > (double)INT32_MAX || value - (double)(int64_t)value > 0.0) {
            return fail("%s %s: give a whole number from 1 to %ld", spec->name, argument,
                        (long)INT32_MAX);
        }
        *(int64_t *)spec->value = (int64_t)value;
        return 0;
    case OPTION_BYTES:
        *(uint64_t *)spec->value = value < 1.0 ? 0 : (uint64_t)value;
        return value >= 1.0
                   ? 0
                   : fail("%s %s: give a size such as 300M, 1.5G or 24GB", spec->name, argument);
    case OPTION_REAL:
        *(float *)spec->value = (float)value;
        return value >= 0.0 ? 0 : fail("%s %s: give a number from 0", spec->name, argument);
    case OPTION_BUDGET:
        return parse_option_budget((option_budget *)spec->value, argument) == 0
                   ? 0
                   : fail(
                         "%s %s: give a size such as 300M or 1.5G, a share of the plain arena such "
                         "as 50%%, or plain, half or smallest",
                         spec->name, argument);
    case OPTION_TEXT:
        *(const char **)spec->value = argument;
        return text ? 0 : fail("%s needs a name", spec->name);
    case OPTION_WORD:
        return text ? add_word((option_words *)spec->value, text)
                    : fail("%s needs a name", spec->name);
    default:
        *(bool *)spec->value = true;
        return 0;
    }
}

// ---- names --------------------------------------------------------------------------------------

enum { NAME_BYTES = 64 };

/* The letters, in lower case, and digits of the first `length` characters. */
OPTION_API void squeeze_name(const char *text, size_t length, char *squeezed) {
    size_t count = 0;
    for (size_t i = 0; i < length && text[i] && count + 1 < NAME_BYTES; i++) {
        if (isalnum((unsigned char)text[i])) {
            squeezed[count++] = (char)tolower((unsigned char)text[i]);
        }
    }
    squeezed[count] = 0;
}

/* How well a name is what was asked for, in any case and whatever is between letters and digits: 4
   if it ends with that, 3 if it contains it; 2 or 1 if it ends with or contains the words one after
   another; 0 if not. */
OPTION_API int score_name(const char *name, const char *wanted) {
    char has[NAME_BYTES], all[NAME_BYTES], word[NAME_BYTES];
    squeeze_name(name, strlen(name), has);
    squeeze_name(wanted, strlen(wanted), all);
    const char *at = has, *found = strstr(has, all);
    const size_t before = found ? strlen(has) - strlen(all) : 0;
    if (all[0] == 0 || found) {
        return all[0] == 0 ? 0 : strcmp(has + before, all) == 0 ? 4 : 3;
    }
    for (const char *w = wanted; *w && at; w += strcspn(w, " -_./")) {
        w += strspn(w, " -_./");
        squeeze_name(w, strcspn(w, " -_./"), word);
        at = strstr(at, word);
        at += at ? strlen(word) : 0;
    }
    return !at ? 0 : *at == 0 ? 2 : 1;
}

OPTION_API void print_names(FILE *file, const char *const *names, int count, int score,
                            const char *wanted) {
    size_t column = 2;
    const char *before = "  ";
    for (int i = 0; i < count; i++) {
        if (score == 0 || score_name(names[i], wanted) == score) {
            column += strlen(names[i]) + 2;
            fprintf(file, "%s%s", column > 98 ? ",\n  " : before, names[i]);
            column = column > 98 ? strlen(names[i]) + 4 : column;
            before = ", ";
        }
    }
    fprintf(file, "\n");
}

/* The number of the name that was asked for; or -1, after an error that lists the candidates. */
OPTION_API int find_name(const char *option, const char *wanted, const char *const *names,
                         int count, const char *others) {
    int best = 0, index = -1, same = 0;
    for (int i = 0; i < count; i++) {
        const int score = score_name(names[i], wanted);
        same = score > best ? 1 : same + (score == best);
        index = score > best ? i : index;
        best = score > best ? score : best;
    }
    if (best > 0 && same == 1) {
        return index;
    }
    fail("%s %s: %s", option, wanted, best > 0 ? "could be each of" : others);
    print_names(stderr, names, count, best, wanted);
    return -1;
}

OPTION_API void name_program(const char *path) {
    const char *slash = strrchr(path, '/');
    snprintf(options_program, sizeof options_program, "%s", slash ? slash + 1 : path);
}

/* Prints how the program is used, after what is wrong. Returns 1. */
OPTION_API int fail_usage(bool takes_words) {
    fprintf(stderr, "usage: %s [options]%s; --help lists them\n", options_program,
            takes_words ? " [file ...]" : "");
    return 1;
}

/* Reads a command line; words is NULL if only options are allowed. Prints the reason and returns 1
   at a mistake. */
OPTION_API int read_options(const option_spec *specs, int count, int argc, char **argv,
                            option_words *words) {
    name_program(argc > 0 ? argv[0] : "");
    for (int i = 1; i < argc; i++) {
        int k = 0;
        while (k < count && strcmp(argv[i], specs[k].name) != 0) {
            k++;
        }
        if (k < count) {
            if (read_option(&specs[k], i + 1 < argc ? argv[i + 1] : NULL) != 0) {
                return 1;
            }
            i += specs[k].kind != OPTION_FLAG;
        } else if (!words || argv[i][0] == '-') {
            fail("unknown option %s", argv[i]);
            return fail_usage(words != NULL);
        } else if (add_word(words, argv[i]) != 0) {
            return 1;
        }
    }
    return 0;
}

/* The default of an option, perhaps written into `text`; NULL: it has none. */
OPTION_API const char *default_of(const option_spec *spec, char text[32]) {
    const option_budget *budget = (const option_budget *)spec->value;
    double number = 0.0;
    switch (spec->kind) {
    case OPTION_FLAG:
    case OPTION_WORD:
        return NULL;
    case OPTION_TEXT:
        return *(const char **)spec->value;
    case OPTION_COUNT:
        number = (double)*(const int64_t *)spec->value;
        break;
    case OPTION_BYTES:
        number = (double)*(const uint64_t *)spec->value;
        break;
    case OPTION_REAL:
        number = (double)*(const float *)spec->value;
        break;
    case OPTION_BUDGET:
        number = budget->bytes ? (double)budget->bytes : 100.0 * budget->share;
        break;
    }
    const bool is_share = spec->kind == OPTION_BUDGET && !budget->bytes;
    snprintf(text, 32, spec->kind == OPTION_REAL ? "%.6g%s" : "%.15g%s", number,
             is_share ? "%" : "");
    return is_share && budget->name ? budget->name : number > 0.0 ? text : NULL;
}

/* Prints an option as the help of a program has it, up to its default and the end of the line. */
OPTION_API void print_option(const option_spec *spec) {
    char name[32];
    snprintf(name, sizeof name, "%s %s", spec->name, spec->argument ? spec->argument : "");
    printf(strlen(name) > 16 ? "  %s\n%19s" : "  %-16s %s", name, "");
    for (const char *c = spec->help; *c; c++) {
        putchar(*c);
        if (*c == '\n') {
            printf("%19s", "");
        }
    }
}

/* The help of a program, without defaults. */
OPTION_API void print_options(const char *usage, const option_spec *specs, int count) {
    printf("usage: %s %s\n\n", options_program, usage);
    for (int i = 0; i < count; i++) {
        print_option(&specs[i]);
        putchar('\n');
    }
}

/* The whole command line of a program: reads it, as read_options does, unless --help is a part of
   it; this prints the usage, the options and their defaults, and ends the program. */
OPTION_API int take_options(const char *usage, const option_spec *specs, int count, int argc,
                            char **argv, option_words *words) {
    name_program(argc > 0 ? argv[0] : "");
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            printf("usage: %s %s\n\n", options_program, usage);
            for (int k = 0; k < count; k++) {
                char text[32];
                const char *by_default = default_of(&specs[k], text);
                print_option(&specs[k]);
                printf(by_default ? " (%s)\n" : "%s\n", by_default ? by_default : "");
            }
            printf("  %-16s this text\n", "--help");
            exit(0);
        }
    }
    return read_options(specs, count, argc, argv, words);
}

/* Prints that there is nothing of this name, and returns 1. */
OPTION_API int fail_name(const char *option, const char *name) {
    return fail("%s %s: there is none of this name; --help lists them", option, name);
}

/* Prints the reason and returns 1 if a number is too large for the program. */
OPTION_API int check_most(const char *option, int64_t value, int64_t most) {
    return value <= most
               ? 0
               : fail("%s %lld: give at most %lld", option, (long long)value, (long long)most);
}

// ---- units --------------------------------------------------------------------------------------

OPTION_API double mebibytes(uint64_t bytes) {
    return (double)bytes / 1048576.0;
}

/* A number to show with so many digits after the point, rounded up, so that a budget that is typed
   in again is large enough. */
OPTION_API double rounded_up(double value, int digits) {
    const double scale = digits == 0 ? 1.0 : digits == 1 ? 10.0 : 100.0;
    return ceil(value * scale) / scale;
}

#endif // MEMSCALE_OPTIONS_H

#if defined(MEMSCALE_H) && !defined(MEMSCALE_OPTIONS_OF_MODELS)
#define MEMSCALE_OPTIONS_OF_MODELS

// ---- budgets ------------------------------------------------------------------------------------

#define OPTION_BUDGET_HELP                                                                         \
    "what training may take: bytes such as 300M or 1.5G (powers of 1024), a share of\n"            \
    "the plain arena such as 50%, or plain, smallest, or half, half way from the smallest\n"       \
    "to what the plan takes without a budget"

OPTION_API bool has_budget(const option_budget *budget) {
    return budget->bytes > 0 || budget->share > 0.0 || budget->name != NULL;
}

/* The bytes that were asked for, of a model that is planned without a budget. Prints the reason and
   returns 1 if they cannot be found. */
OPTION_API int choose_bytes(const option_budget *budget, ms_model *model, uint64_t *bytes) {
    ms_memory_report report;
    uint64_t smallest = 0;
    const bool by_name = budget->name && strcmp(budget->name, "plain") != 0;
    *bytes = budget->bytes;
    if (*bytes) {
        return 0;
    }
    if (ms_report(model, &report) != MS_RESULT_OK ||
        (by_name && ms_smallest_budget(model, &smallest) != MS_RESULT_OK)) {
        return fail("%s", ms_last_error(model));
    }
    const uint64_t plain = report.plain_bytes, most = report.arena_bytes; // in 16 bits these differ
    *bytes = !by_name                            ? plain
             : strcmp(budget->name, "half") == 0 ? smallest + (most - smallest) / 2
                                                 : smallest;
    *bytes = budget->share > 0.0 ? (uint64_t)(budget->share * (double)plain) : *bytes;
    return 0;
}

/* ms_wrap, once more if the budget is a part of what the first plan found to be plain. */
OPTION_API ms_result wrap_in(const option_budget *budget, ms_model *model) {
    uint64_t bytes = 0;
    const ms_result result = ms_wrap(model);
    if (result != MS_RESULT_OK || !has_budget(budget) || budget->bytes > 0) {
        return result;
    }
    if (choose_bytes(budget, model, &bytes) != 0) {
        return MS_RESULT_BUDGET;
    }
    ms_set_budget(model, bytes);
    return ms_wrap(model);
}

// ---- debug mode ---------------------------------------------------------------------------------

#define OPTION_DEBUG_HELP                                                                          \
    "debug mode: check that layers do what they declare; a mistake ends the program, with\n"       \
    "the layer, the operand and the cure. A step takes many times as long"

/* For ms_config.log: warnings of debug mode, and which checkpoints were passed over and why. */
OPTION_API void log_warnings(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)user;
    if (level <= MS_LOG_WARNING && (strcmp(tag, "debug") == 0 || strcmp(tag, "file") == 0)) {
        fail("%s", text);
    }
}

/* Says, after training, that debug mode has ended no step. */
OPTION_API void print_debugged(bool debug) {
    if (debug) {
        printf("debug     every layer does what it declares\n");
    }
}

// ---- offloading ---------------------------------------------------------------------------------

#define OPTION_OFFLOAD_HELP                                                                        \
    "auto (default): to the host as the mode and the device say; on: also in other\n"              \
    "modes and on other devices; or off"

/* Reads such an argument, or NULL; prints the reason and returns 1 if there is no such switch. */
OPTION_API int choose_offloading(const char *text, ms_switch *is) {
    const bool on = text && strcmp(text, "on") == 0, off = text && strcmp(text, "off") == 0;
    *is = on ? MS_SWITCH_ON : off ? MS_SWITCH_OFF : MS_SWITCH_DEFAULT;
    return !text || on || off || strcmp(text, "auto") == 0
               ? 0
               : fail("--offload %s: there are auto, on and off", text);
}

#endif // MEMSCALE_OPTIONS_OF_MODELS

#if defined(MEMSCALE_NN_H) && !defined(MEMSCALE_OPTIONS_OF_NETS)
#define MEMSCALE_OPTIONS_OF_NETS

#include <time.h>

// ---- where it computes --------------------------------------------------------------------------

#define OPTION_DEVICE_HELP "cpu, or cuda, the first GPU"

typedef struct option_device {
    ms_backend backend;
    const nn_device *kernels;
} option_device;

/* Finds a device by its name; prints the reason and returns 1 if this program does not have it. */
OPTION_API int choose_device(option_device *d, const char *name) {
    const bool on_gpu = strcmp(name, "cuda") == 0;
    if (!on_gpu && strcmp(name, "cpu") != 0) {
        return fail("--device %s: there are cpu and cuda", name);
    }
#ifdef NN_CUDA
    d->backend = on_gpu ? ms_backend_cuda(0) : ms_backend_cpu();
    d->kernels = on_gpu ? nn_cuda() : nn_cpu();
#else
    if (on_gpu) {
        return fail("--device cuda: this program was built without CUDA; where there is nvcc, "
                    "`make cuda` builds build/cuda/examples/%s",
                    options_program);
    }
    d->backend = ms_backend_cpu();
    d->kernels = nn_cpu();
#endif
    return 0;
}

/* Seconds since some moment in the past. */
OPTION_API double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif // MEMSCALE_OPTIONS_OF_NETS
