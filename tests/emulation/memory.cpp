/* Memory of the device, pinned memory and guarded host memory: a region each, mapped twice. Programs
 * get addresses in the mapping whose protection changes; the emulation itself copies through the
 * other one, which is always open. Addresses are not used twice. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>

namespace {

const size_t page = 4096;
const size_t device_alignment = 256;
const unsigned char canary = 0xA5;

struct allocation {
    size_t size;         /* as asked for */
    size_t first, pages; /* offset in the region of the first page; bytes of the pages */
    size_t address;      /* offset in the region */
    bool is_mapped;
};

struct region {
    char *base, *open;
    size_t reserved, used;
    int file;
    uint64_t bytes, count;
    std::map<size_t, allocation> allocations; /* by address */
    std::map<size_t, allocation> released;    /* a few of the last ones, for the message */
};

region regions[MEMORY_KINDS];
volatile sig_atomic_t is_kernel_mode;
bool is_device_open; /* to the host as well */
pthread_t kernel_thread;
uint64_t random_state;
uint32_t poison;

volatile sig_atomic_t is_armed;
pthread_t armed_thread;
sigjmp_buf armed;
char death[600];
struct sigaction before[3];

const char *const kind_names[] = {"device", "pinned", "host"};

bool is_in(const region &r, const void *pointer) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t base = reinterpret_cast<uintptr_t>(r.base);
    return r.base && p >= base && p - base < r.reserved;
}

size_t offset_in(const region &r, const void *pointer) {
    return static_cast<size_t>(static_cast<const char *>(pointer) - r.base);
}

/* The allocation with the last address at or below an offset. */
const allocation *below(const std::map<size_t, allocation> &all, size_t offset) {
    std::map<size_t, allocation>::const_iterator i = all.upper_bound(offset);
    if (i == all.begin()) {
        return nullptr;
    }
    return &(--i)->second;
}

bool protect(char *at, size_t size, int protection) {
    return !size || mprotect(at, size, protection) == 0;
}

/* Only what lives, for the kernel walks through all pages of a range that ever were. */
void protect_allocations(const region &r, int protection, bool only_mapped) {
    for (std::map<size_t, allocation>::const_iterator i = r.allocations.begin();
         i != r.allocations.end(); ++i) {
        if (!only_mapped || i->second.is_mapped) {
            protect(r.base + i->second.first, i->second.pages, protection);
        }
    }
}

/* Host memory has no guard pages, and is opened and closed in one go. */
void protect_host(int protection) {
    const region &r = regions[MEMORY_HOST];
    if (!r.allocations.empty()) {
        const size_t first = r.allocations.begin()->second.first;
        protect(r.base + first, r.used - first, protection);
    }
}

/* ---- faults ---- */

/* "offset 12 of an allocation of 400 bytes" */
void describe(const region &r, size_t offset, char *text, size_t size) {
    const allocation *const a = below(r.allocations, offset);
    if (a && offset < a->address + a->size) {
        snprintf(text, size, "offset %zu of an allocation of %zu bytes", offset - a->address,
                 a->size);
        return;
    }
    const allocation *const gone = below(r.released, offset);
    if (gone && offset < gone->address + gone->size) {
        snprintf(text, size, "offset %zu of %zu bytes that were freed", offset - gone->address,
                 gone->size);
    } else if (a && offset < a->first + a->pages + page) {
        snprintf(text, size, "%zu bytes after the end of an allocation of %zu bytes",
                 offset - a->address - a->size, a->size);
    } else {
        std::map<size_t, allocation>::const_iterator next = r.allocations.upper_bound(offset);
        if (next != r.allocations.end() && next->second.address - offset <= 2 * page) {
            snprintf(text, size, "%zu bytes before an allocation of %zu bytes",
                     next->second.address - offset, next->second.size);
        } else {
            snprintf(text, size, "no allocation is near");
        }
    }
}

void fault_in_region(memory_kind kind, const void *address) {
    char where[160];
    describe(regions[kind], offset_in(regions[kind], address), where, sizeof(where));
    if (fibers_is_inside()) {
        emulation_die("kernel %s, %s: touched %s memory at %p: %s", fibers_kernel(), fibers_where(),
                      kind_names[kind], address, where);
    }
    emulation_die("host code touched %s memory at %p: %s", kind_names[kind], address, where);
}

void on_fault(int number, siginfo_t *info, void *context) {
    const memory_kind kind = number == SIGILL ? MEMORY_OTHER : memory_where(info->si_addr);
    if (number == SIGILL && fibers_is_inside()) { /* -fsanitize=alignment */
        emulation_die("kernel %s, %s: misaligned address, or another trap of the compiler",
                      fibers_kernel(), fibers_where());
    }
    if ((kind == MEMORY_PINNED || kind == MEMORY_HOST) && is_kernel_mode &&
        !pthread_equal(kernel_thread, pthread_self())) {
        while (is_kernel_mode) { /* another thread's kernels run: later */
            usleep(50);
        }
        return;
    }
    if (kind != MEMORY_OTHER) {
        fault_in_region(kind, info->si_addr);
    }
    if (fibers_is_inside()) {
        emulation_die("kernel %s, %s: signal %d at %p, which is not device memory", fibers_kernel(),
                      fibers_where(), number, info->si_addr);
    }
    const struct sigaction *const old = &before[number == SIGILL ? 2 : number == SIGBUS];
    if (old->sa_flags & SA_SIGINFO) {
        old->sa_sigaction(number, info, context);
    } else if (old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
        old->sa_handler(number);
    } else {
        signal(number, SIG_DFL); /* and again */
    }
}

/* Again and again: test frameworks put handlers of their own in place for each test. */
void install_handler() {
    static const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
    struct sigaction action, old;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], &action, &old);
        if (old.sa_sigaction != on_fault) {
            before[i] = old;
        }
    }
}

/* ---- regions ---- */

void reserve(region &r, size_t size) {
    r.file = static_cast<int>(syscall(SYS_memfd_create, "emulation", 0));
    const bool is_sized = r.file >= 0 && ftruncate(r.file, static_cast<off_t>(size)) == 0;
    void *const a = !is_sized
                        ? MAP_FAILED
                        : mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, r.file, 0);
    void *const b = a == MAP_FAILED ? a
                                    : mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_NORESERVE, r.file, 0);
    if (b == MAP_FAILED) {
        perror("emulation: address space");
        abort();
    }
    r.base = static_cast<char *>(a);
    r.open = static_cast<char *>(b);
    r.reserved = size;
}

uint64_t draw() {
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return random_state >> 33;
}

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

/* All that is not the allocation, in its pages. */
bool is_canary(const region &r, const allocation &a, size_t *wrong) {
    for (size_t i = a.first; i < a.first + a.pages; i++) {
        if (i == a.address) {
            i += a.size;
        }
        if (i < a.first + a.pages && static_cast<unsigned char>(r.open[i]) != canary) {
            *wrong = i;
            return false;
        }
    }
    return true;
}

void check(memory_kind kind, const allocation &a) {
    size_t wrong = 0;
    if (!is_canary(regions[kind], a, &wrong)) {
        const bool is_after = wrong >= a.address + a.size;
        emulation_die("%s memory was written %zu bytes %s an allocation of %zu bytes at %p",
                      kind_names[kind], is_after ? wrong - a.address - a.size : a.address - wrong,
                      is_after ? "after the end of" : "before", a.size,
                      static_cast<void *>(regions[kind].base + a.address));
    }
}

/* Each copy doubles what is there. */
void fill_rubbish(char *at, size_t size) {
    const size_t first = size < sizeof(poison) ? size : sizeof(poison);
    memcpy(at, &poison, first);
    for (size_t n = first; n < size;) {
        const size_t more = n < size - n ? n : size - n, piece = more < 16384 ? more : 16384;
        memcpy(at + n, at, piece);
        n += piece;
    }
}

void fill(const region &r, const allocation &a) {
    const size_t end = a.address + a.size;
    memset(r.open + a.first, canary, a.address - a.first);
    fill_rubbish(r.open + a.address, a.size);
    memset(r.open + end, canary, a.first + a.pages - end);
}

void give_back(region &r, const allocation &a) {
    protect(r.base + a.first, a.pages, PROT_NONE);
    fallocate(r.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(a.first),
              static_cast<off_t>(a.pages));
}

} // namespace

void memory_set_mode(bool is_kernel) {
    const int open = PROT_READ | PROT_WRITE;
    const region &device = regions[MEMORY_DEVICE], &pinned = regions[MEMORY_PINNED];
    if (is_kernel == static_cast<bool>(is_kernel_mode)) {
        return;
    }
    if (is_kernel) {
        install_handler();
        kernel_thread = pthread_self();
        is_kernel_mode = 1;
        protect_allocations(pinned, PROT_NONE, false);
        protect_allocations(pinned, open, true);
        protect_host(PROT_NONE);
        protect_allocations(device, open, false);
        return;
    }
    if (!is_device_open) {
        protect_allocations(device, PROT_NONE, false);
    }
    protect_allocations(pinned, open, false);
    protect_host(open);
    is_kernel_mode = 0;
}

static void open_device(bool is_open) {
    is_device_open = is_open;
    if (is_kernel_mode) {
        return;
    }
    protect_allocations(regions[MEMORY_DEVICE], is_open ? PROT_READ | PROT_WRITE : PROT_NONE,
                        false);
}

/* A process that was forked has the regions of its parent, and must not touch them. */
static void leave_regions_of_parent() {
    static pid_t owner;
    if (owner && owner != getpid()) {
        for (int i = 0; i < MEMORY_KINDS; i++) {
            munmap(regions[i].base, regions[i].reserved);
            munmap(regions[i].open, regions[i].reserved);
            close(regions[i].file);
            regions[i] = region();
        }
    }
    owner = getpid();
}

void memory_reset(uint64_t seed) {
    static const size_t sizes[] = {size_t(1) << 40, size_t(1) << 38, size_t(1) << 38};
    static const uint32_t patterns[] = {0x7FC57FC5u, 0xFFFFFFFFu, 0x7F7F7F7Fu, 0x4B5A4B5Au};
    leave_regions_of_parent();
    memory_set_mode(false);
    open_device(false);
    for (int i = 0; i < MEMORY_KINDS; i++) {
        region &r = regions[i];
        if (!r.base) {
            reserve(r, sizes[i]);
        }
        if (i == MEMORY_HOST) { /* the test's own: it stays */
            continue;
        }
        while (!r.allocations.empty()) {
            give_back(r, r.allocations.begin()->second);
            r.allocations.erase(r.allocations.begin());
        }
        r.bytes = r.count = 0;
    }
    install_handler();
    random_state = seed * 2 + 1;
    draw();
    poison = patterns[draw() % 4];
}

void *memory_allocate(memory_kind kind, size_t size, bool is_mapped) {
    region &r = regions[kind];
    allocation a;
    a.size = size;
    a.is_mapped = is_mapped;
    a.pages = round_up(size, page);
    a.first = r.used + (kind == MEMORY_HOST ? 0 : page);
    if (size > r.reserved || a.first + a.pages + page > r.reserved) {
        return nullptr;
    }
    install_handler();
    const size_t alignment = kind == MEMORY_DEVICE ? device_alignment : 64;
    /* An overrun meets the guard page, or an underrun does. */
    a.address = a.first + (draw() % 4 ? a.pages - round_up(size, alignment) : 0);
    r.used = a.first + a.pages;
    r.bytes += size;
    r.count++;
    fill(r, a);
    r.allocations[a.address] = a;
    if (kind != MEMORY_DEVICE || is_device_open) {
        protect(r.base + a.first, a.pages, PROT_READ | PROT_WRITE);
    }
    return r.base + a.address;
}

bool memory_release(memory_kind kind, void *pointer) {
    region &r = regions[kind];
    const std::map<size_t, allocation>::iterator i =
        is_in(r, pointer) ? r.allocations.find(offset_in(r, pointer)) : r.allocations.end();
    if (i == r.allocations.end()) {
        return false;
    }
    const allocation a = i->second;
    r.allocations.erase(i);
    r.bytes -= a.size;
    r.count--;
    r.released[a.address] = a;
    if (r.released.size() > 256) {
        r.released.erase(r.released.begin());
    }
    check(kind, a);
    give_back(r, a);
    return true;
}

memory_kind memory_where(const void *pointer) {
    for (int i = 0; i < MEMORY_KINDS; i++) {
        if (is_in(regions[i], pointer)) {
            return static_cast<memory_kind>(i);
        }
    }
    return MEMORY_OTHER;
}

bool memory_holds(memory_kind kind, const void *pointer, size_t size) {
    const region &r = regions[kind];
    if (!is_in(r, pointer)) {
        return false;
    }
    const size_t offset = offset_in(r, pointer);
    const allocation *const a = below(r.allocations, offset);
    return a && offset - a->address <= a->size && size <= a->size - (offset - a->address);
}

char *memory_open(const void *pointer) {
    for (int i = 0; i < MEMORY_KINDS; i++) {
        if (is_in(regions[i], pointer)) {
            return regions[i].open + offset_in(regions[i], pointer);
        }
    }
    return static_cast<char *>(const_cast<void *>(pointer));
}

const char *memory_base(memory_kind kind, size_t *size) {
    *size = regions[kind].reserved;
    return regions[kind].base;
}

uint64_t memory_bytes(memory_kind kind) {
    return regions[kind].bytes;
}

uint64_t memory_allocations(memory_kind kind) {
    return regions[kind].count;
}

/* What an allocation costs the device. */
uint64_t memory_charge(size_t size) {
    return round_up(size, size < (size_t(1) << 20) ? 512 : size_t(2) << 20);
}

uint64_t memory_charged(void) {
    const std::map<size_t, allocation> &all = regions[MEMORY_DEVICE].allocations;
    uint64_t sum = 0;
    for (std::map<size_t, allocation>::const_iterator i = all.begin(); i != all.end(); ++i) {
        sum += memory_charge(i->second.size);
    }
    return sum;
}

void memory_check(void) {
    for (int k = 0; k < MEMORY_KINDS; k++) {
        const std::map<size_t, allocation> &all = regions[k].allocations;
        for (std::map<size_t, allocation>::const_iterator i = all.begin(); i != all.end(); ++i) {
            check(static_cast<memory_kind>(k), i->second);
        }
    }
}

/* ---- mistakes ---- */

void emulation_die_now() {
    memory_set_mode(false);
    open_device(false);
    if (is_armed && pthread_equal(armed_thread, pthread_self())) {
        is_armed = 0;
        siglongjmp(armed, 1);
    }
    fprintf(stderr, "emulation: %s\n", death);
    abort();
}

void emulation_die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(death, sizeof(death), format, arguments);
    va_end(arguments);
    if (fibers_is_inside()) {
        fibers_abandon();
    }
    emulation_die_now();
}

bool emulation_catch(void (*function)(void *), void *user, char *text, size_t size) {
    if (size) {
        text[0] = 0;
    }
    armed_thread = pthread_self();
    if (sigsetjmp(armed, 1)) {
        emulation_unlock_all();
        snprintf(text, size, "%s", death);
        return true;
    }
    install_handler();
    is_armed = 1;
    function(user);
    is_armed = 0;
    return false;
}

void *emulation_host_alloc(size_t size) {
    const emulation_lock lock;
    return memory_allocate(MEMORY_HOST, size ? size : 1, false);
}

void emulation_host_release(void *pointer) {
    const emulation_lock lock;
    if (pointer && !memory_release(MEMORY_HOST, pointer)) {
        emulation_die("emulation_host_release of %p, which is not allocated", pointer);
    }
}

void emulation_open(bool is_open) {
    const emulation_lock lock;
    open_device(is_open);
}

bool emulation_is_device(const void *pointer) {
    return memory_where(pointer) == MEMORY_DEVICE;
}

void emulation_peek(void *to, const void *device, size_t size) {
    memcpy(to, memory_open(device), size);
}

void emulation_poke(void *device, const void *from, size_t size) {
    memcpy(memory_open(device), from, size);
}
