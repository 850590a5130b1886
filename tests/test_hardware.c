/*  test_hardware.c - what the host tells of its memory, in trees of files that stand for /proc and
    /sys; speeds that are measured, where memory or calls fail too; devices that are built in. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 // mkdtemp
#endif
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The clock of the platform, or, while a test plays a device, one that the device alone moves. */
static double played_us = -1.0;

static double read_clock(void) {
    struct timespec now;
    return played_us >= 0.0 || clock_gettime(CLOCK_MONOTONIC, &now) != 0
               ? played_us
               : 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

#include "private.h"

#include "toy_layers.h"

// ------------------------------------------------------------------------------------------------
// a tree of files

enum { TREE_FILES = 64 };

typedef struct tree {
    char root[64];
    char files[TREE_FILES][512], folders[TREE_FILES][512]; // to be removed
    int file_count, folder_count;
} tree;

static void tree_open(tree *t) {
    memset(t, 0, sizeof *t);
    snprintf(t->root, sizeof t->root, "/tmp/memscale_tree_XXXXXX");
    assert_non_null(mkdtemp(t->root));
}

/* Writes a file, and makes the folders that it lies in. */
static void tree_write(tree *t, const char *path, const char *text) {
    char whole[512];
    const int length = snprintf(whole, sizeof whole, "%s%s", t->root, path);
    assert_true(length > 0 && length < (int)sizeof whole);
    for (char *at = whole + strlen(t->root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = 0;
        if (mkdir(whole, 0700) == 0) {
            assert_true(t->folder_count < TREE_FILES);
            memcpy(t->folders[t->folder_count++], whole, sizeof whole);
        }
        *at = '/';
    }
    FILE *file = fopen(whole, "w");
    assert_non_null(file);
    assert_int_equal(fputs(text, file) < 0, 0);
    assert_int_equal(fclose(file), 0);
    assert_true(t->file_count < TREE_FILES);
    memcpy(t->files[t->file_count++], whole, sizeof whole);
}

static void tree_close(tree *t) {
    for (int i = t->file_count - 1; i >= 0; i--) {
        (void)unlink(t->files[i]);
    }
    for (int i = t->folder_count - 1; i >= 0; i--) {
        assert_int_equal(rmdir(t->folders[i]), 0);
    }
    assert_int_equal(rmdir(t->root), 0);
}

/* A host of 16 GiB, 8 of them available. */
static void tree_host(tree *t) {
    tree_open(t);
    tree_write(t, "/proc/meminfo",
               "MemTotal:       16777216 kB\nMemFree:          123456 kB\n"
               "MemAvailable:    8388608 kB\nBuffers:               0 kB\n");
}

static void tree_has(const tree *t, uint64_t total_bytes, uint64_t free_bytes) {
    uint64_t total = 77, available = 77;
    msi_host_memory(t->root, &total, &available);
    if (total != total_bytes || available != free_bytes) {
        print_error("total %llu, free %llu\n", (unsigned long long)total,
                    (unsigned long long)available);
    }
    assert_true(total == total_bytes);
    assert_true(available == free_bytes);
}

#define MEBI ((uint64_t)1 << 20)
#define GIBI ((uint64_t)1 << 30)

// ------------------------------------------------------------------------------------------------
// memory of the host

static void without_cgroups_meminfo_counts(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_close(&t);
}

static void what_is_not_told_is_0(void **state) {
    (void)state;
    tree t;
    tree_open(&t);
    tree_has(&t, 0, 0);
    tree_write(&t, "/proc/meminfo", "MemTotal: 1024 kB\n"); // before Linux 3.14
    tree_has(&t, MEBI, 0);
    tree_write(&t, "/proc/self/cgroup", "0::/a\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.max", "524288\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.current", "4096\n");
    tree_has(&t, MEBI / 2, MEBI / 2 - 4096);
    tree_close(&t);
}

static const char *const mount_2 =
    "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"
    "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 master:4 - cgroup2 cgroup2 rw,nsdelegate\n";

/* The smallest limit and the smallest rest may be those of different groups on the way up. */
static void every_cgroup_up_to_the_root_counts(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_write(&t, "/proc/self/mountinfo", mount_2);
    tree_write(&t, "/proc/self/cgroup", "0::/outer.slice/inner.scope\n");
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_write(&t, "/sys/fs/cgroup/outer.slice/inner.scope/memory.max", "max\n");
    tree_write(&t, "/sys/fs/cgroup/outer.slice/inner.scope/memory.current", "1048576\n");
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_write(&t, "/sys/fs/cgroup/outer.slice/memory.max", "4294967296\n");
    tree_write(&t, "/sys/fs/cgroup/outer.slice/memory.current", "3221225472\n");
    tree_has(&t, 4 * GIBI, GIBI);
    tree_write(&t, "/sys/fs/cgroup/outer.slice/inner.scope/memory.max", "2147483648\n");
    tree_has(&t, 2 * GIBI, GIBI);
    tree_write(&t, "/sys/fs/cgroup/outer.slice/inner.scope/memory.current", "2146435072\n");
    tree_has(&t, 2 * GIBI, MEBI);
    tree_write(&t, "/sys/fs/cgroup/memory.max", "1073741824\n"); // of a container, at its root
    tree_has(&t, GIBI, MEBI);
    tree_close(&t);
}

static void the_high_limit_and_the_page_cache(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_write(&t, "/proc/self/mountinfo", mount_2);
    tree_write(&t, "/proc/self/cgroup", "0::/a\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.max", "4294967296\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.high", "3221225472\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.current", "2147483648\n");
    tree_has(&t, 3 * GIBI, GIBI);
    tree_write(&t, "/sys/fs/cgroup/a/memory.stat",
               "anon 5\nfile 1073741824\nactive_file 7\ninactive_file 536870912\nslab 1\n");
    tree_has(&t, 3 * GIBI, GIBI + GIBI / 2);
    tree_write(&t, "/sys/fs/cgroup/a/memory.stat", "inactive_file 99999999999\n");
    tree_has(&t, 3 * GIBI, 3 * GIBI);
    tree_write(&t, "/sys/fs/cgroup/a/memory.stat", "inactive_file 0\n");
    tree_write(&t, "/sys/fs/cgroup/a/memory.current", "4000000000\n"); // above the high limit
    tree_has(&t, 3 * GIBI, 4096);
    tree_write(&t, "/sys/fs/cgroup/a/memory.max", "99999999999999999999999\n"); // overflows
    tree_write(&t, "/sys/fs/cgroup/a/memory.high", "rubbish\n");
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_close(&t);
}

static void version_1_has_other_names(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_write(&t, "/proc/self/mountinfo",
               "25 22 0:21 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
               "31 22 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
               "32 22 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    tree_write(&t, "/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/job/step\n0::/x\n");
    tree_write(&t, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    tree_write(&t, "/sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "9223372036854771712\n");
    tree_write(&t, "/sys/fs/cgroup/memory/job/step/memory.usage_in_bytes", "1\n");
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_write(&t, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
    tree_write(&t, "/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "536870912\n");
    tree_write(&t, "/sys/fs/cgroup/memory/job/memory.stat",
               "inactive_file 1048576\ntotal_inactive_file 268435456\n");
    tree_has(&t, GIBI, GIBI / 2 + GIBI / 4);
    tree_write(&t, "/sys/fs/cgroup/cpu/x/memory.limit_in_bytes", "1\n"); // not of that controller
    tree_has(&t, GIBI, GIBI / 2 + GIBI / 4);
    tree_close(&t);
}

/* Mounts that show a part of the hierarchy, and paths that are not in it. */
static void mounts_inside_the_hierarchy(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_write(&t, "/proc/self/cgroup", "7:memory:/docker/abc/inner\n");
    tree_write(&t, "/proc/self/mountinfo",
               "31 22 0:27 /docker/abc /sys/fs/my\\040groups rw - cgroup cgroup rw,memory\n");
    tree_write(&t, "/sys/fs/my groups/inner/memory.limit_in_bytes", "2147483648\n");
    tree_has(&t, 2 * GIBI, 2 * GIBI);
    tree_write(&t, "/proc/self/cgroup", "7:memory:/docker/abcd\n"); // another group
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    tree_write(&t, "/sys/fs/my groups/memory.limit_in_bytes", "3221225472\n");
    tree_has(&t, 3 * GIBI, 3 * GIBI);
    tree_write(&t, "/proc/self/mountinfo", mount_2);
    tree_write(&t, "/proc/self/cgroup", "0::/../sibling\n"); // outside of the namespace
    tree_write(&t, "/sys/fs/cgroup/memory.max", "1073741824\n");
    tree_write(&t, "/sys/fs/sibling/memory.max", "1\n");
    tree_has(&t, GIBI, GIBI);
    tree_close(&t);
}

static void the_usual_mount_points_where_none_is_told(void **state) {
    (void)state;
    tree t;
    tree_host(&t);
    tree_write(&t, "/proc/self/cgroup", "3:memory:/job\n");
    tree_write(&t, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
    tree_has(&t, GIBI, GIBI);
    tree_write(&t, "/proc/self/cgroup", "0::/job/\n");
    tree_write(&t, "/sys/fs/cgroup/job/memory.max", "2147483648\n");
    tree_has(&t, 2 * GIBI, 2 * GIBI);
    tree_close(&t);
}

/* Lines that are too long, cut off, or of random characters. */
static void files_that_are_not_as_they_should_be(void **state) {
    (void)state;
    tree t;
    t_rng rng = t_seed(5);
    char text[3 * 4096];
    tree_host(&t);
    memset(text, 'x', sizeof text);
    snprintf(text + 9000, 200, "\n%s", mount_2); // behind a line that fits in no buffer
    tree_write(&t, "/proc/self/mountinfo", text);
    tree_write(&t, "/proc/self/cgroup", "0::/a");
    tree_write(&t, "/sys/fs/cgroup/a/memory.max", "1073741824");
    tree_has(&t, GIBI, GIBI);
    text[0] = 0;
    memset(text, 'y', 5000); // a path that is too long has no limits
    memcpy(text, "0::/", 4);
    text[5000] = 0;
    tree_write(&t, "/proc/self/cgroup", text);
    tree_has(&t, 16 * GIBI, 8 * GIBI);
    for (int i = 0; i < 400; i++) {
        static const char signs[] = "0123456789:/\\, -cgroup2memory.\n\n";
        uint64_t total, available;
        const uint32_t length = t_below(&rng, 300);
        for (uint32_t k = 0; k < length; k++) {
            text[k] = signs[t_below(&rng, sizeof signs - 1)];
        }
        text[length] = 0;
        tree_write(&t, i % 2 ? "/proc/self/mountinfo" : "/proc/self/cgroup", text);
        t.file_count--;
        msi_host_memory(t.root, &total, &available);
        assert_true(total <= 16 * GIBI && available <= 8 * GIBI && available >= 4096);
    }
    tree_close(&t);
}

/* The real tree: what the CPU backend reports is within what /proc says. */
static void the_host_of_this_test(void **state) {
    (void)state;
    ms_hardware hardware;
    uint64_t total = 0, available = 0;
    const ms_backend cpu = ms_backend_cpu();
    memset(&hardware, 0, sizeof hardware);
    cpu.hardware(cpu.user, &hardware);
    msi_host_memory("", &total, &available);
    assert_true(hardware.total_bytes == hardware.host_total_bytes);
    assert_true(hardware.free_bytes == hardware.host_free_bytes);
    assert_true(hardware.host_total_bytes == total);
    assert_true(total == 0 || available <= total);
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) {
        print_message("no /proc here\n");
        skip();
    }
    fclose(file);
    assert_true(total > MEBI && available >= 4096);
    assert_true(hardware.processor_count >= 1);
}

/* Without /proc, as in a chroot, the system is asked: about what /proc says. */
static void the_system_says_what_proc_says(void **state) {
    (void)state;
    uint64_t total = 0, available = 0;
    msi_host asked;
    asked.root = "";
    asked.total_bytes = asked.free_bytes = UINT64_MAX;
    msi_ask_system(&asked);
    assert_true(asked.total_bytes > MEBI && asked.total_bytes < UINT64_MAX >> 4);
    assert_true(asked.free_bytes <= asked.total_bytes);
    total = msi_read_key("", "/proc", "meminfo", "MemTotal:", 0) << 10;
    available = msi_read_key("", "/proc", "meminfo", "MemFree:", 0) << 10;
    if (total == 0) {
        print_message("no /proc here\n");
        skip();
    }
    assert_true(asked.total_bytes / 64 <= total / 63 && total / 64 <= asked.total_bytes / 63);
    assert_true(asked.free_bytes >= available / 2);
}

static void knows_nothing(void *user, ms_hardware *hardware) {
    (void)user;
    snprintf(hardware->name, sizeof hardware->name, "a device that keeps silent");
}

/* A budget of 0 is a share of free memory: where that is not known, an error tells what to set. */
static void a_budget_of_unknown_memory_is_an_error(void **state) {
    (void)state;
    t_chain chain;
    uint64_t smallest = 0;
    ms_memory_report report;
    ms_config config = t_config();
    config.memory_budget_bytes = 0;
    config.backend = ms_backend_cpu();
    config.backend.hardware = knows_nothing;
    assert_int_equal(t_chain_create(&chain, &config, 4, 8, 8), MS_RESULT_OK);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_text_has(ms_last_error(chain.model), "share of the free memory");
    t_text_has(ms_last_error(chain.model),
               "set ms_config.memory_budget_bytes or call ms_set_budget");
    t_ok(chain.model, ms_smallest_budget(chain.model, &smallest));
    ms_set_budget(chain.model, smallest);
    t_ok(chain.model, ms_wrap(chain.model));
    ms_set_budget(chain.model, 0);
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_report(chain.model, &report); // the plan in force stays
    assert_int_equal(report.budget_bytes, smallest);
    ms_hardware device;
    memset(&device, 0, sizeof device);
    device.free_bytes = device.total_bytes = GIBI;
    ms_set_hardware(chain.model, &device);
    t_ok(chain.model, ms_wrap(chain.model));
    ms_destroy(chain.model);
}

// ------------------------------------------------------------------------------------------------
// a device whose speeds are known: every function takes its time

typedef struct slow {
    ms_backend cpu;
    double copy_us, to_device_us, to_host_us; // of a mebibyte
    double mapped_us;                         // of a mebibyte that is read and written
    double launch_us, product_us, tf32_us;    // of anything; of 1e6 flops
    ms_hardware stated;
    uint64_t states; // open ones
    bool tf32;       // of the state that was opened last
    bool without_f16;
    int open_error, copy_error;
} slow;

static void spin(double us) {
    played_us += us;
}

static int slow_open(void *user, const ms_open_args *args, void **state) {
    slow *s = (slow *)user;
    s->tf32 = args->tf32;
    s->states += s->open_error == 0;
    *state = user;
    return s->open_error;
}

static void slow_close(void *state) {
    ((slow *)state)->states--;
}

static int slow_copy(void *state, void *to, const void *from, uint64_t bytes) {
    slow *s = (slow *)state;
    (void)to, (void)from;
    spin(s->launch_us + s->copy_us * (double)bytes / (double)MEBI);
    return s->copy_error;
}

static int slow_copy_in(void *state, void *to, const void *from, uint64_t bytes) {
    (void)to, (void)from;
    spin(((slow *)state)->to_device_us * (double)bytes / (double)MEBI);
    return 0;
}

static int slow_copy_out(void *state, void *to, const void *from, uint64_t bytes) {
    (void)to, (void)from;
    spin(((slow *)state)->to_host_us * (double)bytes / (double)MEBI);
    return 0;
}

static int slow_fill_f32(void *state, void *device, float value, uint64_t count) {
    (void)device, (void)value, (void)count;
    spin(((slow *)state)->launch_us);
    return 0;
}

static int slow_gemm(void *state, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                     const ms_matrix *c) {
    slow *s = (slow *)state;
    (void)alpha, (void)beta;
    const double megaflops = 2e-6 * (double)a->rows * (double)b->rows * (double)c->cols;
    if (a->dtype == MS_DTYPE_F16 && s->without_f16) {
        return 9;
    }
    spin(megaflops * (s->tf32 ? s->tf32_us : s->product_us) *
         (a->dtype == MS_DTYPE_F16 ? 0.5 : 1.0));
    return 0;
}

/* The step is not halted, and the value and its gradient lie apart from what says so. */
static int slow_update(void *state, const ms_update_args *args) {
    slow *s = (slow *)state;
    const ms_step_state running = MSI_ZERO_INIT;
    assert_memory_equal(&args->state_of_step->halted, &running.halted, sizeof running.halted);
    assert_true(args->gradient == args->value + args->count);
    assert_true(args->state[1] == args->state[0] + args->count);
    assert_true((const void *)(args->gradient + args->count) <= (const void *)args->factors);
    spin(s->mapped_us * 2.0 * sizeof(float) * (double)args->count / (double)MEBI);
    return 0;
}

static void slow_hardware(void *user, ms_hardware *hardware) {
    *hardware = ((slow *)user)->stated;
}

static ms_backend slow_backend(slow *s) {
    ms_backend b = t_backend_without_state();
    played_us = 1e12;
    memset(s, 0, sizeof *s);
    s->cpu = b;
    s->copy_us = 250.0; // 8.4 GB/s, both ways together
    s->to_device_us = 100.0;
    s->to_host_us = 200.0;
    s->mapped_us = 400.0;
    s->launch_us = 20.0;
    s->product_us = 10.0; // 0.1 TFLOPS
    s->tf32_us = 2.5;
    snprintf(s->stated.name, sizeof s->stated.name, "slow");
    s->stated.tf32 = true;
    s->stated.memory_gb_per_s = 11.0;
    s->stated.f16_tflops = 12.0;
    s->stated.tf32_tflops = 13.0;
    b.user = s;
    b.open = slow_open;
    b.close = slow_close;
    b.copy = slow_copy;
    b.copy_in = slow_copy_in;
    b.copy_out = slow_copy_out;
    b.fill_f32 = slow_fill_f32;
    b.gemm = slow_gemm;
    b.update = slow_update;
    b.maps_host = true;
    b.hardware = slow_hardware;
    return b;
}

/* The clock may count whole microseconds, of samples of some hundred. */
static void expect_speed(double measured, double expected) {
    if (!(fabs(measured - expected) < 0.01 * expected)) {
        print_error("%g instead of %g\n", measured, expected);
        fail();
    }
}

static void speeds_are_those_of_the_device(void **state) {
    (void)state;
    slow s;
    t_heap heap;
    ms_model *m;
    ms_hardware hardware, again;
    ms_config config = t_config();
    memset(&heap, 0, sizeof heap);
    config.backend = slow_backend(&s);
    config.allocator = t_heap_allocator(&heap);
    t_ok(NULL, ms_create(&config, &m));
    const uint64_t live_bytes = heap.live_bytes;
    const double start = played_us;
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(hardware.is_measured);
    assert_string_equal(hardware.name, "slow");
    expect_speed(hardware.memory_gb_per_s, 2.0 * 1048.576 / 250.0 / (1.0 + 20.0 / 2000.0));
    expect_speed(hardware.to_device_gb_per_s, 1048.576 / 100.0);
    expect_speed(hardware.to_host_gb_per_s, 1048.576 / 200.0);
    expect_speed(hardware.mapped_gb_per_s, 2.0 * 1048.576 / 400.0);
    expect_speed(hardware.f32_tflops, 0.1);
    expect_speed(hardware.f16_tflops, 0.2);
    expect_speed(hardware.tf32_tflops, 0.4);
    expect_speed(hardware.launch_us, 20.0);
    assert_true(played_us - start < 100e3);
    assert_int_equal(s.states, 1); // that of the model
    assert_true(heap.live_bytes == live_bytes && heap.wrong_releases == 0);

    s.copy_us *= 10.0; // what was measured stays, what the backend tells is asked again
    snprintf(s.stated.name, sizeof s.stated.name, "other");
    t_ok(m, ms_hardware_report(m, &again));
    assert_string_equal(again.name, "other");
    assert_true(again.is_measured);
    assert_memory_equal(&again.memory_gb_per_s, &hardware.memory_gb_per_s,
                        MSI_SPEED_COUNT * sizeof(double));
    ms_destroy(m);
    assert_int_equal(s.states, 0);
    assert_int_equal(heap.live_count, 0);
}

/* A device each of whose launches takes as long as a list says. */
static const double *next_us;

static int listed_fill(void *state, void *device, float value, uint64_t count) {
    (void)state, (void)device, (void)value, (void)count;
    spin(*next_us++);
    return 0;
}

/* The middle one of the samples, the longer of two; as many as there is time for. */
static void the_median_of_any_number_of_samples(void **state) {
    (void)state;
    static const struct {
        double us[6]; // of the samples; the one after the last is not taken
        int count;
        double expected;
    } cases[] = {{{6000.0, 1.0}, 1, 6000.0},
                 {{4000.0, 5000.0, 1.0}, 2, 5000.0},
                 {{5000.0, 1.0}, 1, 5000.0},
                 {{1000.0, 3000.0, 2000.0, 1.0}, 3, 2000.0},
                 {{3000.0, 1000.0, 2500.0, 1.0}, 3, 2500.0},
                 {{900.0, 2000.0, 800.0, 3000.0, 1.0}, 4, 2000.0},
                 {{700.0, 500.0, 900.0, 600.0, 800.0, 1.0}, 5, 700.0},
                 {{500.0, 510.0, 900.0, 920.0, 910.0, 1.0}, 5, 900.0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        slow s;
        msi_bench t;
        ms_backend b = slow_backend(&s);
        const ms_config config = t_config();
        memset(&t, 0, sizeof t);
        b.fill_f32 = listed_fill;
        t.config = &config;
        t.backend = &b;
        t.device_bytes = 128; // room for what a copy reads, and for what it writes
        t.host_bytes = t.copy_bytes = 64;
        t.end_us = played_us + 1e6;
        next_us = cases[i].us;
        expect_speed(msi_bench_median_us(&t, MSI_TIMED_LAUNCH, 1000.0), cases[i].expected);
        assert_int_equal(next_us - cases[i].us, cases[i].count);
        t.end_us = played_us; // no time left
        expect_speed(msi_bench_median_us(&t, MSI_TIMED_LAUNCH, 1234.0), 1234.0);
    }
}

/* Of a device on which everything takes long there is one call of each, and the start of a few. */
static void a_slow_device_is_not_waited_for(void **state) {
    (void)state;
    slow s;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    config.backend = slow_backend(&s);
    s.copy_us = s.to_device_us = s.to_host_us = 5000.0;
    s.launch_us = 30000.0;
    s.product_us = s.tf32_us = 20000.0;
    t_ok(NULL, ms_create(&config, &m));
    const double start = played_us;
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(hardware.is_measured);
    expect_speed(hardware.launch_us, 30000.0);
    expect_speed(hardware.to_host_gb_per_s, 1048.576 / 5000.0);
    expect_speed(hardware.f32_tflops, 1.0 / 20000.0);
    const double product_us = 2e-6 * 128.0 * 128.0 * 128.0 * 20000.0;
    const double once_us = 30000.0 + 3.0 * 8.0 * 5000.0 + 30000.0 + 2.5 * product_us;
    assert_true(played_us - start < once_us + 100e3);
    ms_destroy(m);
}

/* A dry run has no state of its own, and measures as well. */
static void a_dry_run_measures_too(void **state) {
    (void)state;
    slow s;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    config.backend = slow_backend(&s);
    config.dry_run = true;
    s.without_f16 = true;
    t_ok(NULL, ms_create(&config, &m));
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(hardware.is_measured);
    expect_speed(hardware.f32_tflops, 0.1);
    assert_true(hardware.f16_tflops == 12.0); // as stated: there are no such products
    assert_int_equal(s.states, 0);
    ms_destroy(m);
}

static void speeds_stay_as_stated_without_memory(void **state) {
    (void)state;
    slow s;
    t_heap heap;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    memset(&heap, 0, sizeof heap);
    config.backend = slow_backend(&s);
    config.allocator = t_heap_allocator(&heap);
    t_ok(NULL, ms_create(&config, &m));
    s.open_error = 3;
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_memory_equal(&hardware, &s.stated, sizeof hardware);
    assert_true(!hardware.is_measured && hardware.memory_gb_per_s == 11.0);
    s.open_error = 0;
    s.stated.free_bytes = 100000; // too little to measure in
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(!hardware.is_measured && hardware.memory_gb_per_s == 11.0);
    s.stated.free_bytes = 0;
    for (uint64_t i = 1;; i++) {
        heap.calls = 0;
        heap.fail_at = i;
        heap.has_failed = false;
        t_ok(m, ms_hardware_report(m, &hardware));
        if (!heap.has_failed) {
            break;
        }
        assert_true(!hardware.is_measured && hardware.memory_gb_per_s == 11.0);
        assert_true(i < 10);
    }
    assert_true(hardware.is_measured);
    ms_destroy(m);
    assert_int_equal(heap.live_count, 0);
}

/* A device that only enqueues, of a backend whose functions all receive NULL. */
static slow *queued;
static double queued_us;

static int queued_fill_f32(void *state, void *device, float value, uint64_t count) {
    (void)device, (void)value, (void)count;
    assert_null(state);
    queued_us += queued->launch_us;
    return 0;
}

static int queued_gemm(void *state, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                       const ms_matrix *c) {
    const double before = played_us;
    assert_null(state);
    const int error = slow_gemm(queued, alpha, a, b, beta, c);
    queued_us += played_us - before;
    played_us = before;
    return error;
}

static int queued_synchronize(void *state) {
    assert_null(state);
    spin(queued_us);
    queued_us = 0.0;
    return 0;
}

static int queued_record(void *state, ms_stream_kind stream, uint32_t event) {
    (void)state, (void)stream, (void)event;
    return 0;
}

static int queued_wait_on_host(void *state, uint32_t event) {
    (void)event;
    return queued_synchronize(state);
}

static void queued_hardware(void *user, ms_hardware *hardware) {
    assert_null(user);
    *hardware = queued->stated;
}

static void a_device_that_enqueues_is_waited_for(void **state) {
    (void)state;
    slow s;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    (void)slow_backend(&s);
    queued = &s;
    config.backend = t_backend_without_state();
    config.backend.is_asynchronous = true;
    config.backend.hardware = queued_hardware;
    config.backend.fill_f32 = queued_fill_f32;
    config.backend.gemm = queued_gemm;
    config.backend.synchronize = queued_synchronize;
    config.backend.record = config.backend.wait = queued_record;
    config.backend.wait_on_host = queued_wait_on_host;
    config.dry_run = true;
    t_ok(NULL, ms_create(&config, &m));
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(hardware.is_measured);
    expect_speed(hardware.launch_us, 20.0);
    expect_speed(hardware.f32_tflops, 0.1);
    ms_destroy(m);
}

static void a_device_that_fails_is_an_error(void **state) {
    (void)state;
    slow s;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    config.backend = slow_backend(&s);
    t_ok(NULL, ms_create(&config, &m));
    s.copy_error = 6;
    t_error(m, ms_hardware_report(m, &hardware), MS_RESULT_BACKEND);
    t_text_has(ms_last_error(m), "measuring its speeds failed with error 6");
    assert_true(!hardware.is_measured && hardware.memory_gb_per_s == 11.0);
    assert_int_equal(s.states, 1);
    s.copy_error = 0;
    t_ok(m, ms_hardware_report(m, &hardware));
    assert_true(hardware.is_measured);
    ms_destroy(m);
}

/* Every call of the CPU's table fails once: an error, or a speed less. */
static void every_call_fails_once(void **state) {
    (void)state;
    t_device device;
    t_heap heap;
    ms_model *m;
    ms_hardware hardware;
    ms_config config = t_config();
    played_us = -1.0;
    memset(&heap, 0, sizeof heap);
    config.backend = t_device_backend(&device);
    config.allocator = t_heap_allocator(&heap);
    t_failing f = t_failing_device(&device);
    f.errors = 1u << MS_RESULT_OK | 1u << MS_RESULT_BACKEND;
    f.heap = &heap;
    while (t_next_failure(&f, f.at < 12 ? 1 : 11)) {
        t_ok(NULL, ms_create(&config, &m));
        t_arm(&f);
        const ms_result result = ms_hardware_report(m, &hardware);
        const bool failed = t_failed(&f, m, result);
        assert_true(failed ? result == MS_RESULT_OK || !hardware.is_measured
                           : hardware.is_measured);
        ms_destroy(m);
    }
    assert_true(f.error_count >= 3);
}

static void the_cpu_is_measured(void **state) {
    (void)state;
    ms_model *m;
    ms_hardware hardware;
    t_ok(NULL, ms_create(NULL, &m));
    played_us = -1.0;
    const double start = read_clock();
    t_ok(m, ms_hardware_report(m, &hardware));
    const double first_us = read_clock() - start;
    assert_true(hardware.is_measured);
    assert_true(hardware.memory_gb_per_s > 0.01 && hardware.memory_gb_per_s < 1e5);
    assert_true(hardware.to_device_gb_per_s > 0.01 && hardware.to_host_gb_per_s > 0.01);
    assert_true(hardware.f32_tflops > 1e-6 && hardware.f32_tflops < 1e3);
    assert_true(hardware.f16_tflops > 1e-6 && hardware.f16_tflops < 1e3);
    assert_true(hardware.tf32_tflops == 0.0); // nothing of the kind
    print_message("%s: memory %.1f GB/s, to device %.1f, to host %.1f; F32 %.4f TFLOPS, F16 %.4f; "
                  "launch %.3f us; in %.1f ms\n",
                  hardware.name, hardware.memory_gb_per_s, hardware.to_device_gb_per_s,
                  hardware.to_host_gb_per_s, hardware.f32_tflops, hardware.f16_tflops,
                  hardware.launch_us, first_us * 1e-3);
    ms_destroy(m);
}

// ------------------------------------------------------------------------------------------------
// when

typedef struct asking {
    ms_model *model;
    ms_result result;
} asking;

static int ask(const ms_call *call) {
    asking *a = (asking *)call->user;
    ms_hardware hardware;
    memset(call->out[0].data, 0, (size_t)ms_shape_count(&call->out[0].shape) * sizeof(float));
    a->result = ms_hardware_report(a->model, &hardware);
    return 0;
}

static int pass_nothing(const ms_call *call) {
    (void)call;
    return 0;
}

static void not_in_a_callback(void **state) {
    (void)state;
    asking a;
    ms_layer_desc d;
    ms_hardware hardware;
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    t_ok(NULL, ms_create(NULL, &a.model));
    d.forward = ask;
    d.user = &a;
    d.backward = pass_nothing;
    d.param[0] = ms_param(a.model, "w", MS_DTYPE_F32, ms_shape1(4));
    d.in[0] = ms_input(a.model, "x", MS_DTYPE_F32, ms_shape1(4));
    d.out[0] = ms_activation(a.model, "y", MS_DTYPE_F32, ms_shape1(4));
    ms_register_layer(a.model, &d);
    ms_set_loss(a.model, d.out[0]);
    t_ok(a.model, ms_wrap(a.model));
    t_write_zeros(a.model);
    t_ok(a.model, ms_eval(a.model, NULL));
    assert_int_equal(a.result, MS_RESULT_ORDER);
    t_ok(a.model, ms_hardware_report(a.model, &hardware));
    ms_destroy(a.model);
}

/* A report between forward and backward disturbs no value. */
static void in_the_middle_of_a_step(void **state) {
    (void)state;
    t_chain plain, asked;
    ms_hardware hardware;
    double loss[2];
    ms_config config = t_config();
    t_chain_start(&plain, &config, 4);
    t_chain_start(&asked, &config, 4);
    t_ok(plain.model, ms_forward(plain.model, &loss[0]));
    t_ok(asked.model, ms_forward(asked.model, &loss[1]));
    t_ok(asked.model, ms_hardware_report(asked.model, &hardware));
    t_ok(plain.model, ms_backward(plain.model));
    t_ok(asked.model, ms_backward(asked.model));
    t_ok(plain.model, ms_update(plain.model));
    t_ok(asked.model, ms_update(asked.model));
    t_chain_same(&plain, &asked);
    ms_destroy(plain.model);
    ms_destroy(asked.model);
}

// ------------------------------------------------------------------------------------------------
// devices that are built in

static void built_in_devices(void **state) {
    (void)state;
    uint32_t count = 0;
    for (const ms_hardware *h; (h = ms_hardware_at(count)) != NULL; count++) {
        assert_true(memchr(h->name, 0, sizeof h->name) != NULL && h->name[0]);
        assert_ptr_equal(ms_hardware_find(h->name), h);
        assert_true(h->kind == MS_DEVICE_DISCRETE || h->kind == MS_DEVICE_INTEGRATED);
        assert_true(h->free_bytes <= h->total_bytes && h->total_bytes >= 4 * GIBI);
        assert_true((h->kind == MS_DEVICE_INTEGRATED) == (h->host_total_bytes != 0));
        assert_true(h->compute_major >= 7);
        assert_true(h->fp16_tensor == (strstr(h->name, "GTX") == NULL));
        assert_true(h->bf16 == (h->compute_major >= 8) && h->tf32 == h->bf16);
        assert_true(h->tf32 == (h->tf32_tflops > 0.0));
        assert_true(!h->is_measured);
        /* 64 or 128 multiply-adds a clock and multiprocessor: a clock of 0.6 to 3 GHz. */
        const uint32_t capability = 10 * h->compute_major + h->compute_minor;
        const double adds = capability <= 80 ? 64.0 : 128.0;
        const double ghz = h->f32_tflops * 1e3 / (2.0 * adds * (double)h->processor_count);
        assert_true(ghz > 0.6 && ghz < 3.0);
        /* Tensor cores: the rate of F32 or twice that on a GeForce, more on all others. Those of 7.5
           do no TF32, and F16 at four times the rate of F32; those of a GTX are none. */
        const bool is_geforce = strstr(h->name, "GeForce") != NULL;
        const double f16 = h->bf16 ? 2.0 : h->fp16_tensor ? 4.0 : 1.0;
        assert_true((is_geforce && h->bf16) == (h->tf32_tflops == h->f32_tflops) ||
                    strstr(h->name, "L40"));
        assert_true(is_geforce == (h->f16_tflops == f16 * h->f32_tflops) ||
                    strstr(h->name, "L40") || strstr(h->name, "RTX 2000 Ada") ||
                    strstr(h->name, "RTX 4000 Ada"));
        assert_true(h->f16_tflops >= 1.9 * h->f32_tflops || !h->fp16_tensor);
        assert_true(h->tf32_tflops <= h->f16_tflops);
        assert_true(h->memory_gb_per_s > 1.9 * h->to_device_gb_per_s);
    }
    assert_true(count >= 3);
    assert_null(ms_hardware_at(count));
    assert_null(ms_hardware_at(UINT32_MAX));
}

static void devices_are_found_by_a_part_of_their_name(void **state) {
    (void)state;
    static const char *const found[][2] = {
        {"h200", "NVIDIA H200"}, // not GH200, which the size of its memory ends
        {"b200", "NVIDIA B200"},
        {"a10g", "NVIDIA A10G"},
        {"2080", "NVIDIA GeForce RTX 2080"},
        {"1660 ti", "NVIDIA GeForce GTX 1660 Ti"},
        {"gh200 96gb", "NVIDIA GH200 96GB"},
        {"rtx 3090", "NVIDIA GeForce RTX 3090"}, // the Ti does not end with it
        {"RTX 3090 ", "NVIDIA GeForce RTX 3090"},
        {"rtx3090ti", "NVIDIA GeForce RTX 3090 Ti"},
        {"rtx-5090", "NVIDIA GeForce RTX 5090"},
        {"4070", "NVIDIA GeForce RTX 4070"},
        {"4070 super", "NVIDIA GeForce RTX 4070 SUPER"},
        {"4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"},
        {"A10", "NVIDIA A10"},
        {"l4", "NVIDIA L4"},
        {"A100 40GB", "NVIDIA A100 40GB"},
        {"Orin Nano 8GB", "Jetson Orin Nano 8GB"},
        {"nano 8gb super", "Jetson Orin Nano 8GB Super"},
    };
    static const char long_name[] =
        "a name of more than 64 bytes, which no device can have, although "
        "it ends with RTX 3090";
    static const char *const missed[] = {"H2000", "", " - ", "Voodoo2", long_name};
    static const char *const several[] = {"JETSON", "orin", "Orin Nano", "A100",   "A100 80GB",
                                          "h100",   "3080", "SUPER",     "nvidia", "0"};
    for (size_t i = 0; i < sizeof found / sizeof found[0]; i++) {
        const ms_hardware *h = ms_hardware_find(found[i][0]);
        assert_non_null(h);
        assert_string_equal(h->name, found[i][1]);
    }
    for (size_t i = 0; i < sizeof missed / sizeof missed[0]; i++) {
        assert_null(ms_hardware_find(missed[i]));
    }
    for (size_t i = 0; i < sizeof several / sizeof several[0]; i++) {
        assert_null(ms_hardware_find(several[i]));
    }
    assert_null(ms_hardware_find(NULL));
    assert_true(ms_hardware_find("rtx 3090")->memory_gb_per_s == 936.0);
    assert_int_equal(ms_hardware_find("nano 4gb")->kind, MS_DEVICE_INTEGRATED);
}

/* In any case, and whatever is between letters and digits. */
static void networks_are_found_by_name(void **state) {
    (void)state;
    static const struct {
        const char *name, *device;
        double gb_per_s;
        bool is_link;
    } all[] = {
        {"nvlink", "A100 80GB SXM", 0.8 * 300.0, false},
        {"NVLink", "H100 80GB SXM", 0.8 * 450.0, false},
        {"nvlink", "B200", 0.8 * 900.0, false},
        {"pcie", "RTX 4090", 0.76 * 31.5, true},
        {"PCIe", "B200", 0.76 * 63.0, true},
        {"10gbe", "RTX 4090", 0.96 * 10.0 / 8.0, false},
        {"25GbE", "RTX 4090", 0.96 * 25.0 / 8.0, false},
        {"100GbE", "RTX 4090", 0.96 * 100.0 / 8.0, false},
        {"InfiniBand HDR", "H100 80GB SXM", 0.96 * 200.0 / 8.0, false},
        {"infiniband_ndr", "H100 80GB SXM", 0.96 * 400.0 / 8.0, false},
        {"memory", "RTX 4090", 4.0, false},
    };
    static const char *const missed[] = {"", " - ", "infiniband", "nvlink2", "token ring"};
    uint32_t count = 0;
    for (; ms_network_at(count); count++) {
        ms_hardware h = *ms_hardware_find("H200");
        assert_true(ms_network_named(ms_network_at(count), &h));
        assert_true(h.network_gb_per_s > 0.0 && h.network_us > 0.0);
    }
    assert_int_equal(count, 8);
    assert_null(ms_network_at(UINT32_MAX));
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ms_hardware h = *ms_hardware_find(all[i].device);
        assert_true(ms_network_named(all[i].name, &h));
        assert_true(fabs(h.network_gb_per_s / all[i].gb_per_s - 1.0) < 1e-9);
        assert_int_equal(h.network_is_link, all[i].is_link);
    }
    for (size_t i = 0; i < sizeof missed / sizeof missed[0] + 2;
         i++) { // then a device without, and NULL
        ms_hardware h = *ms_hardware_find("RTX 4090");
        const size_t names = sizeof missed / sizeof missed[0];
        const char *name = i < names ? missed[i] : i == names ? "nvlink" : NULL;
        const ms_hardware before = h;
        assert_false(ms_network_named(name, &h));
        assert_memory_equal(&h, &before, sizeof h);
    }
    assert_false(ms_network_named("pcie", NULL));
    /* Without a link of its own a device has the typical one. */
    ms_hardware none;
    memset(&none, 0, sizeof none);
    assert_true(ms_network_named("pcie", &none) && none.network_is_link);
    assert_true(none.network_gb_per_s == 0.0);
}

/* Speeds of a network are refused as those of a device are. */
static void a_network_that_is_none_is_an_error(void **state) {
    (void)state;
    static const double speeds[][2] = {{-1.0, 1.0}, {1.0, -1.0}, {NAN, 1.0}, {1.0, INFINITY}};
    t_chain chain;
    const ms_config config = t_config();
    t_chain_start(&chain, &config, 2);
    for (size_t i = 0; i < sizeof speeds / sizeof speeds[0]; i++) {
        ms_hardware h = *ms_hardware_find("RTX 4090");
        h.network_gb_per_s = speeds[i][0];
        h.network_us = speeds[i][1];
        ms_set_hardware(chain.model, &h);
        t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
        t_text_has(ms_last_error(chain.model), "network");
    }
    ms_destroy(chain.model);
}

/* Where a name finds nothing, nothing is planned in silence for the device at hand. */
static void a_device_that_is_not_found_is_an_error(void **state) {
    (void)state;
    t_chain chain;
    ms_memory_report report;
    uint64_t bytes;
    const ms_config config = t_config();
    t_chain_start(&chain, &config, 2);
    for (int k = 0; k < 2; k++) { // the error lasts
        ms_set_hardware(chain.model, ms_hardware_find("rtx 6090"));
        t_text_has(ms_last_error(chain.model), "ms_hardware_at");
        t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
        t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
        t_text_has(ms_last_error(chain.model), "ms_clear_hardware");
        t_error(chain.model, ms_smallest_budget(chain.model, &bytes), MS_RESULT_INVALID);
        ms_set_hardware(chain.model, ms_hardware_find("rtx 5090"));
        t_ok(chain.model, ms_wrap(chain.model));
        t_report(chain.model, &report);
        assert_string_equal(report.device_name, "NVIDIA GeForce RTX 5090");
    }
    ms_set_hardware(chain.model, ms_hardware_find("orin")); // several
    t_error(chain.model, ms_wrap(chain.model), MS_RESULT_INVALID);
    t_ok(chain.model, ms_detach(chain.model));
    ms_clear_hardware(chain.model);
    t_ok(chain.model, ms_wrap(chain.model));
    t_report(chain.model, &report);
    assert_null(ms_hardware_find(report.device_name)); // the CPU again
    ms_set_hardware(NULL, NULL);
    ms_clear_hardware(NULL);
    ms_destroy(chain.model);
}

/* Whether a list of words has one of them. */
static bool has_word(const char *line, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = line; (at = strstr(at, word)) != NULL; at += length) {
        if (at > line && at[-1] == ' ' && (at[length] == ' ' || at[length] == '\n')) {
            return true;
        }
    }
    return false;
}

/* The kernel lists what the processor has and the system allows. */
static void native_formats_are_those_that_the_kernel_lists(void **state) {
    (void)state;
    static char line[8192];
    const ms_backend cpu = ms_backend_cpu();
    ms_hardware h;
    bool listed = false;
    FILE *file = fopen("/proc/cpuinfo", "r");
    memset(&h, 0, sizeof h);
    cpu.hardware(cpu.user, &h);
    while (file != NULL && !listed && fgets(line, sizeof line, file) != NULL) {
#if defined(MSI_X86)
        listed = strncmp(line, "flags", 5) == 0;
#else
        listed = strncmp(line, "Features", 8) == 0;
#endif
    }
    if (file != NULL) {
        fclose(file);
    }
    if (!listed) {
        print_message("no list of the features of the processor\n");
        skip();
    }
#if defined(MSI_X86)
    assert_int_equal(h.bf16, has_word(line, "avx512_bf16") || has_word(line, "amx_bf16"));
    assert_int_equal(h.fp16_tensor, has_word(line, "avx512_fp16") || has_word(line, "amx_fp16"));
#else
    assert_int_equal(h.bf16, has_word(line, "bf16"));
    assert_int_equal(h.fp16_tensor, has_word(line, "asimdhp"));
#endif
}

int main(void) {
    t_hook.platform_us = read_clock;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_cgroups_meminfo_counts),
        cmocka_unit_test(what_is_not_told_is_0),
        cmocka_unit_test(every_cgroup_up_to_the_root_counts),
        cmocka_unit_test(the_high_limit_and_the_page_cache),
        cmocka_unit_test(version_1_has_other_names),
        cmocka_unit_test(mounts_inside_the_hierarchy),
        cmocka_unit_test(the_usual_mount_points_where_none_is_told),
        cmocka_unit_test(files_that_are_not_as_they_should_be),
        cmocka_unit_test(the_host_of_this_test),
        cmocka_unit_test(the_system_says_what_proc_says),
        cmocka_unit_test(a_budget_of_unknown_memory_is_an_error),
        cmocka_unit_test(speeds_are_those_of_the_device),
        cmocka_unit_test(the_median_of_any_number_of_samples),
        cmocka_unit_test(a_slow_device_is_not_waited_for),
        cmocka_unit_test(a_dry_run_measures_too),
        cmocka_unit_test(speeds_stay_as_stated_without_memory),
        cmocka_unit_test(a_device_that_enqueues_is_waited_for),
        cmocka_unit_test(a_device_that_fails_is_an_error),
        cmocka_unit_test(every_call_fails_once),
        cmocka_unit_test(the_cpu_is_measured),
        cmocka_unit_test(not_in_a_callback),
        cmocka_unit_test(in_the_middle_of_a_step),
        cmocka_unit_test(built_in_devices),
        cmocka_unit_test(devices_are_found_by_a_part_of_their_name),
        cmocka_unit_test(networks_are_found_by_name),
        cmocka_unit_test(a_network_that_is_none_is_an_error),
        cmocka_unit_test(a_device_that_is_not_found_is_an_error),
        cmocka_unit_test(native_formats_are_those_that_the_kernel_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
