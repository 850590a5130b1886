/* Runs a grid. The threads of a block are fibers, but a thread that waits for nobody runs on the
 * stack of whichever fiber is at hand, so that only waiting costs a switch. */
#include "internal.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifndef WITH_ASAN
#define WITH_ASAN 0
#endif
#if WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" {
/* The ends of the section, from the linker. */
extern char __start_emulation_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_emulation_shared[] __attribute__((weak, visibility("hidden")));
void emulation_switch(void **save, void *load);
void emulation_fiber_start(void);
}

/* ---- the switch: saves what a call must keep, and changes the stack ---- */

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl emulation_switch\n"
        ".type emulation_switch, @function\n"
        "emulation_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size emulation_switch, . - emulation_switch\n");
#define WITH_SWITCH 1
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl emulation_switch\n"
        ".type emulation_switch, %function\n"
        "emulation_switch:\n"
        "    sub sp, sp, #160\n"
        "    stp x19, x20, [sp, #0]\n"
        "    stp x21, x22, [sp, #16]\n"
        "    stp x23, x24, [sp, #32]\n"
        "    stp x25, x26, [sp, #48]\n"
        "    stp x27, x28, [sp, #64]\n"
        "    stp x29, x30, [sp, #80]\n"
        "    stp d8, d9, [sp, #96]\n"
        "    stp d10, d11, [sp, #112]\n"
        "    stp d12, d13, [sp, #128]\n"
        "    stp d14, d15, [sp, #144]\n"
        "    mov x9, sp\n"
        "    str x9, [x0]\n"
        "    mov sp, x1\n"
        "    ldp x19, x20, [sp, #0]\n"
        "    ldp x21, x22, [sp, #16]\n"
        "    ldp x23, x24, [sp, #32]\n"
        "    ldp x25, x26, [sp, #48]\n"
        "    ldp x27, x28, [sp, #64]\n"
        "    ldp x29, x30, [sp, #80]\n"
        "    ldp d8, d9, [sp, #96]\n"
        "    ldp d10, d11, [sp, #112]\n"
        "    ldp d12, d13, [sp, #128]\n"
        "    ldp d14, d15, [sp, #144]\n"
        "    add sp, sp, #160\n"
        "    ret\n"
        ".size emulation_switch, . - emulation_switch\n");
#define WITH_SWITCH 1
#else
#include <ucontext.h>
#define WITH_SWITCH 0
#endif

namespace {

const unsigned block_limit = 1024;
const size_t small_stack = WITH_ASAN ? 256 << 10 : 64 << 10;
const size_t large_stack = WITH_ASAN ? 8 << 20 : 1 << 20; /* of a launch of one thread */
const size_t guard_size = 4096;

enum wait_kind { RUNS, AT_BARRIER, AT_WARP, HAS_RETURNED, IS_NEW };

struct fiber {
    void *stack_pointer;
    char *stack; /* the lowest address */
    size_t size;
    void *asan_stack;
    unsigned thread; /* whose kernel is on this stack */
    fiber *next, *next_idle;
#if !WITH_SWITCH
    ucontext_t context;
#endif
};

/* What a thread waits for. */
struct thread_state {
    wait_kind wait;
    emulation_warp_kind kind;
    unsigned mask;
    int argument, width, line;
    const char *file;
    uint64_t value;
    fiber *on;
};

struct block_state {
    const kernel_launch *launch;
    const void *closure;
    unsigned threads, started, at_barrier, at_warp, returned;
    bool ready_first, last_first, has_waited;
    uint64_t launch_number, number;
    uint16_t barriers, warp_barriers[block_limit / 32]; /* so far */
    unsigned short order[block_limit];                  /* in which threads start */
    fiber *ready[block_limit];                          /* released, a ring */
    unsigned ready_first_index, ready_count;
    thread_state thread[block_limit];
};

block_state b;
fiber main_fiber;
fiber *current;
fiber *all, *idle, *single;
bool is_abandoned, is_tame;
uint64_t random_state;
uint32_t poison;

uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

bool coin() {
    return draw() >> 20 & 1;
}

unsigned draw_below(unsigned n) {
    return static_cast<unsigned>((draw() >> 20) % n);
}

/* ---- stacks and switches ---- */

void set_index(unsigned thread) {
    const dim3 &d = blockDim;
    if (d.y == 1 && d.z == 1) {
        threadIdx.x = thread;
        return;
    }
    threadIdx.x = thread % d.x;
    threadIdx.y = thread / d.x % d.y;
    threadIdx.z = thread / d.x / d.y;
}

#if WITH_ASAN
const void *main_bottom;
size_t main_size;
const fiber *came_from;

void arrive(void *asan_stack) {
    const void *bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(asan_stack, &bottom, &size);
    if (came_from == &main_fiber) {
        main_bottom = bottom;
        main_size = size;
    }
}
#endif

void switch_to(fiber *to) {
    fiber *const from = current;
    current = to;
#if WITH_ASAN
    const bool is_main = to == &main_fiber;
    came_from = from;
    __sanitizer_start_switch_fiber(&from->asan_stack, is_main ? main_bottom : to->stack,
                                   is_main ? main_size : to->size);
#endif
#if WITH_SWITCH
    emulation_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
#if WITH_ASAN
    arrive(from->asan_stack);
#endif
}

void prepare(fiber *f);

fiber *make_fiber(size_t size) {
    fiber *const f = new fiber();
    void *const memory = mmap(nullptr, size + guard_size, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("emulation: stacks");
        abort();
    }
    mprotect(memory, guard_size, PROT_NONE);
    f->stack = static_cast<char *>(memory) + guard_size;
    f->size = size;
    f->next = all;
    all = f;
    prepare(f);
    return f;
}

fiber *new_fiber() {
    if (b.threads == 1) {
        single = single ? single : make_fiber(large_stack);
        return single;
    }
    if (!idle) {
        return make_fiber(small_stack);
    }
    fiber *const f = idle;
    idle = f->next_idle;
    return f;
}

/* Stacks start at different lines of the cache: they are all in use at once. */
void prepare(fiber *f) {
    const size_t colour = (reinterpret_cast<uintptr_t>(f->stack) / (small_stack + guard_size)) % 31;
    char *const top = f->stack + f->size - 64 - colour * 128;
#if WITH_SWITCH && defined(__x86_64__)
    void **const sp = reinterpret_cast<void **>(top) - 8;
    memset(sp, 0, 8 * sizeof(void *));
    sp[6] = reinterpret_cast<void *>(emulation_fiber_start);
    f->stack_pointer = sp;
#elif WITH_SWITCH
    void **const sp = reinterpret_cast<void **>(top) - 20;
    memset(sp, 0, 20 * sizeof(void *));
    sp[11] = reinterpret_cast<void *>(emulation_fiber_start);
    f->stack_pointer = sp;
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = static_cast<size_t>(top - f->stack);
    f->context.uc_link = nullptr;
    makecontext(&f->context, emulation_fiber_start, 0);
#endif
}

/* ---- who runs next ---- */

void make_ready(fiber *f) {
    b.ready[(b.ready_first_index + b.ready_count++) % block_limit] = f;
}

/* Mostly who came last: so a warp that has exchanged values runs on to the next barrier, ahead of
 * the others. Else they advance side by side. */
fiber *take_ready() {
    const unsigned first = b.ready_first_index;
    b.ready_count--;
    if (b.last_first) {
        return b.ready[(first + b.ready_count) % block_limit];
    }
    b.ready_first_index = (first + 1) % block_limit;
    return b.ready[first];
}

/* What the block before left is forgotten only where it matters. */
void first_wait() {
    if (!b.has_waited) {
        b.has_waited = true;
        for (unsigned i = b.started; i < b.threads; i++) {
            b.thread[b.order[i]].wait = IS_NEW;
        }
    }
}

/* Of a waiting thread: leaves its stack until it is released. */
void wait_here() {
    const bool starts = b.started < b.threads && (!b.ready_count || !b.ready_first);
    fiber *const me = current;
    fiber *const to = starts ? new_fiber() : b.ready_count ? take_ready() : &main_fiber;
    if (to != me) {
        switch_to(to);
    }
    set_index(me->thread);
}

void warp_returned(unsigned thread);

void put_aside(fiber *f) {
    if (f != single) {
        f->next_idle = idle;
        idle = f;
    }
}

/* What every fiber does: threads that have not started, then whoever is ready. */
void run_threads() {
    for (;;) {
        while (b.started < b.threads && !(b.ready_count && b.ready_first)) {
            const unsigned t = b.order[b.started++];
            b.thread[t].on = current;
            b.thread[t].wait = RUNS;
            current->thread = t;
            set_index(t);
            b.launch->call(b.closure);
            b.thread[t].wait = HAS_RETURNED;
            b.returned++;
            if (b.at_warp) {
                warp_returned(t);
            }
        }
        put_aside(current);
        switch_to(b.ready_count ? take_ready() : &main_fiber);
    }
}

/* ---- orders ---- */

/* Threads of a warp stay together, in a changing order; warps too. */
void shuffle_order() {
    const unsigned warps = (b.threads + 31) / 32, first = is_tame ? 0 : draw_below(warps);
    const unsigned lanes = is_tame ? 0 : draw_below(32);
    const bool backwards = !is_tame && coin();
    unsigned n = 0;
    for (unsigned i = 0; i < warps; i++) {
        const unsigned w = (first + (backwards ? warps - i : i)) % warps;
        for (unsigned l = 0; l < 32; l++) {
            const unsigned t = w * 32 + (l ^ lanes);
            if (t < b.threads) {
                b.order[n++] = static_cast<unsigned short>(t);
            }
        }
    }
}

void release_barrier() {
    b.barriers++;
    shuffle_order();
    b.at_barrier = 0;
    for (unsigned i = 0; i < b.threads; i++) {
        thread_state &t = b.thread[b.order[i]];
        t.wait = RUNS;
        make_ready(t.on);
    }
}

/* ---- warps ---- */

const char *const warp_names[] = {"__syncwarp",       "__shfl_sync",     "__shfl_up_sync",
                                  "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync",
                                  "__any_sync",       "__all_sync"};

/* Whether all of the mask that have not returned are here. */
bool is_complete(unsigned warp, const thread_state &me) {
    for (unsigned l = 0; l < 32 && warp * 32 + l < b.threads; l++) {
        const thread_state &t = b.thread[warp * 32 + l];
        if ((me.mask >> l & 1) && t.wait != HAS_RETURNED &&
            !(t.wait == AT_WARP && t.kind == me.kind && t.mask == me.mask)) {
            return false;
        }
    }
    return true;
}

uint64_t vote(unsigned warp, const thread_state &me) {
    uint64_t ballot = 0;
    bool is_all = true;
    for (unsigned l = 0; l < 32 && warp * 32 + l < b.threads; l++) {
        const thread_state &t = b.thread[warp * 32 + l];
        if ((me.mask >> l & 1) && t.wait == AT_WARP) {
            ballot |= t.value << l;
            is_all = is_all && t.value;
        }
    }
    return me.kind == EMULATION_BALLOT ? ballot : me.kind == EMULATION_ANY ? ballot != 0 : is_all;
}

uint64_t shuffled(unsigned warp, unsigned lane, const thread_state &me) {
    const int l = static_cast<int>(lane), width = me.width, start = l / width * width;
    int from = l;
    if (me.kind == EMULATION_SHFL) {
        from = start + (me.argument & (width - 1));
    } else if (me.kind == EMULATION_SHFL_UP) {
        from = l - me.argument < start ? l : l - me.argument;
    } else if (me.kind == EMULATION_SHFL_DOWN) {
        from = l + me.argument >= start + width ? l : l + me.argument;
    } else {
        from = (l ^ me.argument) >= start + width ? l : l ^ me.argument;
    }
    const unsigned t = warp * 32 + static_cast<unsigned>(from);
    if (!(me.mask >> from & 1) || t >= b.threads || b.thread[t].wait != AT_WARP) {
        return UINT64_C(0x7FC57FC57FC57FC5); /* undefined: the lane takes no part */
    }
    return b.thread[t].value;
}

void finish_warp(unsigned warp, const thread_state &me) {
    b.warp_barriers[warp] =
        static_cast<uint16_t>(b.warp_barriers[warp] + (me.kind == EMULATION_SYNCWARP));
    uint64_t results[32];
    const thread_state all_of = me;
    const unsigned lanes = draw_below(32);
    for (unsigned l = 0; l < 32; l++) {
        const unsigned t = warp * 32 + l;
        if (!(all_of.mask >> l & 1) || t >= b.threads || b.thread[t].wait != AT_WARP) {
            continue;
        }
        results[l] = all_of.kind == EMULATION_SYNCWARP ? 0
                     : all_of.kind >= EMULATION_BALLOT ? vote(warp, b.thread[t])
                                                       : shuffled(warp, l, b.thread[t]);
    }
    for (unsigned i = 0; i < 32; i++) {
        const unsigned l = i ^ lanes, t = warp * 32 + l;
        if ((all_of.mask >> l & 1) && t < b.threads && b.thread[t].wait == AT_WARP) {
            b.thread[t].value = results[l];
            b.thread[t].wait = RUNS;
            b.at_warp--;
            make_ready(b.thread[t].on);
        }
    }
}

/* Others may have waited for this lane alone. */
void warp_returned(unsigned thread) {
    const unsigned warp = thread / 32;
    for (unsigned l = 0; l < 32 && warp * 32 + l < b.threads; l++) {
        const thread_state &t = b.thread[warp * 32 + l];
        if (t.wait == AT_WARP && (t.mask >> thread % 32 & 1) && is_complete(warp, t)) {
            finish_warp(warp, t);
        }
    }
}

/* ---- mistakes ---- */

/* "thread (0,0,0) waits at ..." */
void tell(unsigned t, char *text, size_t size) {
    const thread_state &s = b.thread[t];
    const unsigned x = blockDim.x, y = blockDim.y;
    const int n = snprintf(text, size, "thread (%u,%u,%u) ", t % x, t / x % y, t / x / y);
    text += n;
    size -= static_cast<size_t>(n);
    if (s.wait == AT_BARRIER) {
        snprintf(text, size, "waits at %s:%d", s.file, s.line);
    } else if (s.wait == AT_WARP) {
        snprintf(text, size, "waits at %s with mask %08x", warp_names[s.kind], s.mask);
    } else {
        snprintf(text, size, "has returned");
    }
}

[[noreturn]] void die_apart(unsigned one, unsigned other) {
    char first[200], second[200];
    const thread_state &t = b.thread[one];
    tell(one, first, sizeof(first));
    tell(other, second, sizeof(second));
    emulation_die("kernel %s: %s not reached by all threads%s: %s, %s", fibers_kernel(),
                  t.wait == AT_BARRIER ? "__syncthreads" : warp_names[t.kind],
                  t.wait == AT_BARRIER ? "" : " of its mask", first, second);
}

/* Nobody can go on. Names one who waits, at a barrier if any, and one who is not there. */
void die_stuck() {
    unsigned one = 0;
    while (b.thread[one].wait != (b.at_barrier ? AT_BARRIER : AT_WARP)) {
        one++;
    }
    const thread_state &t = b.thread[one];
    unsigned other = t.wait == AT_WARP ? one / 32 * 32 : 0;
    while (other == one || (b.thread[other].wait == t.wait &&
                            (t.wait == AT_BARRIER ||
                             (b.thread[other].kind == t.kind && b.thread[other].mask == t.mask)))) {
        other++;
    }
    die_apart(one, other);
}

/* ---- blocks ---- */

size_t shared_size() {
    return __start_emulation_shared
               ? static_cast<size_t>(__stop_emulation_shared - __start_emulation_shared)
               : 0;
}

void fill_shared() {
    const size_t size = shared_size();
    for (size_t i = 0; i + 4 <= size; i += 4) {
        memcpy(__start_emulation_shared + i, &poison, 4);
    }
}

void run_block() {
    b.started = b.returned = b.at_barrier = b.at_warp = 0;
    b.ready_first_index = b.ready_count = 0;
    b.ready_first = coin();
    b.last_first = draw_below(8) > 0;
    if (b.has_waited) { /* without waiting, no thread sees what others left */
        fill_shared();
    }
    b.has_waited = false;
    while (b.started < b.threads || b.ready_count) {
        switch_to(b.ready_count ? take_ready() : new_fiber());
        if (is_abandoned) {
            is_abandoned = false;
            emulation_die_now();
        }
    }
    if (b.returned < b.threads) {
        die_stuck();
    }
}

/* A step through n blocks that meets each once. */
uint64_t draw_stride(uint64_t n) {
    if (is_tame || n < 2) {
        return 1;
    }
    if (draw_below(4)) {
        return coin() ? 1 : n - 1;
    }
    for (;;) {
        const uint64_t stride = 1 + (draw() >> 20) % n;
        uint64_t x = n, y = stride;
        while (y) {
            const uint64_t rest = x % y;
            x = y;
            y = rest;
        }
        if (x == 1) {
            return stride;
        }
    }
}

} // namespace

extern "C" void emulation_fiber_start(void) {
#if WITH_ASAN
    arrive(nullptr);
#endif
    run_threads();
}

void emulation_syncthreads(const char *file, int line) {
    const unsigned me = current->thread;
    thread_state &t = b.thread[me];
    first_wait();
    t.wait = AT_BARRIER;
    t.file = file;
    t.line = line;
    if (++b.at_barrier == b.threads) {
        for (unsigned i = 0; i < b.threads; i++) {
            const thread_state &o = b.thread[i];
            if (o.line != line || (o.file != file && strcmp(o.file, file) != 0)) {
                die_apart(me, i);
            }
        }
        release_barrier();
    }
    wait_here();
}

uint64_t emulation_warp(emulation_warp_kind kind, unsigned mask, uint64_t value, int argument,
                        int width) {
    const unsigned me = current->thread;
    thread_state &t = b.thread[me];
    if (!(mask >> me % 32 & 1)) {
        emulation_die("kernel %s, %s: %s with mask %08x, in which lane %u itself is not",
                      fibers_kernel(), fibers_where(), warp_names[kind], mask, me % 32);
    }
    if (width < 1 || width > 32 || (width & (width - 1))) {
        emulation_die("kernel %s: %s with width %d", fibers_kernel(), warp_names[kind], width);
    }
    first_wait();
    t.wait = AT_WARP;
    t.kind = kind;
    t.mask = mask;
    t.value = value;
    t.argument = argument;
    t.width = width;
    b.at_warp++;
    if (is_complete(me / 32, t)) {
        finish_warp(me / 32, t);
    }
    wait_here();
    return t.value;
}

void fibers_run(const kernel_launch *launch, const void *closure) {
    b.launch = launch;
    b.launch_number++;
    b.closure = closure;
    gridDim = launch->grid;
    blockDim = launch->block;
    threadIdx.y = threadIdx.z = 0;
    b.threads = blockDim.x * blockDim.y * blockDim.z;
    b.has_waited = true;
    current = &main_fiber;
    const uint64_t plane = static_cast<uint64_t>(gridDim.x) * gridDim.y, n = plane * gridDim.z;
    const uint64_t stride = draw_stride(n);
    uint64_t i = is_tame ? 0 : (draw() >> 10) % n;
    for (uint64_t k = 0; k < n; k++) {
        blockIdx.x = static_cast<unsigned>(i % gridDim.x);
        blockIdx.y = static_cast<unsigned>(i / gridDim.x % gridDim.y);
        blockIdx.z = static_cast<unsigned>(i / plane);
        b.number = i;
        if (k % 4 == 0) {
            shuffle_order();
        }
        run_block();
        i = i >= n - stride ? i - (n - stride) : i + stride;
    }
    current = nullptr;
}

bool fibers_place(kernel_place *place) {
    if (!fibers_is_inside()) {
        return false;
    }
    const unsigned thread = current->thread;
    place->launch = b.launch_number;
    place->block = b.number;
    place->thread = static_cast<uint16_t>(thread);
    place->barriers = b.barriers;
    place->warp_barriers = b.warp_barriers[thread / 32];
    place->shared = __start_emulation_shared;
    place->shared_size = shared_size();
    return true;
}

bool fibers_is_inside() {
    return current && current != &main_fiber;
}

void fibers_abandon() {
    is_abandoned = true;
    switch_to(&main_fiber);
    abort();
}

void fibers_reset(uint64_t seed) {
    current = nullptr;
    is_abandoned = false;
    is_tame = !seed;
    random_state = seed * UINT64_C(0x9E3779B97F4A7C15) + 88172645463325252u;
    draw();
    poison = coin() ? 0x7FC57FC5u : 0x7F7F7F7Fu;
    idle = nullptr;
    for (fiber *f = all; f; f = f->next) {
#if WITH_ASAN
        __asan_unpoison_memory_region(f->stack, f->size);
#endif
        prepare(f);
        put_aside(f);
    }
}

/* ---- names, from the symbols of the program ---- */

static int find_base(struct dl_phdr_info *info, size_t, void *base) {
    *static_cast<uintptr_t *>(base) = info->dlpi_addr;
    return 1; /* the first is the program */
}

static std::string read_file(const char *path) {
    std::string s;
    FILE *const f = fopen(path, "rb");
    static char buffer[65536]; /* the stack may be a small one */
    for (size_t n = 0; f && (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) {
        s.append(buffer, n);
    }
    if (f) {
        fclose(f);
    }
    return s;
}

/* Kernels are static: only the full table of symbols has them. */
static std::string find_symbol(uintptr_t address) {
    static const std::string file = read_file("/proc/self/exe");
    uintptr_t base = 0;
    dl_iterate_phdr(find_base, &base);
    ElfW(Ehdr) head;
    if (file.size() < sizeof(head)) {
        return "";
    }
    memcpy(&head, file.data(), sizeof(head));
    for (unsigned i = 0; i < head.e_shnum; i++) {
        ElfW(Shdr) table, strings;
        memcpy(&table, file.data() + head.e_shoff + i * sizeof(table), sizeof(table));
        if (table.sh_type != SHT_SYMTAB) {
            continue;
        }
        memcpy(&strings, file.data() + head.e_shoff + table.sh_link * sizeof(table),
               sizeof(strings));
        for (size_t s = 0; s < table.sh_size / sizeof(ElfW(Sym)); s++) {
            ElfW(Sym) symbol;
            memcpy(&symbol, file.data() + table.sh_offset + s * sizeof(symbol), sizeof(symbol));
            if (symbol.st_shndx != SHN_UNDEF && base + symbol.st_value == address &&
                (symbol.st_info & 15) == STT_FUNC) {
                return file.data() + strings.sh_offset + symbol.st_name;
            }
        }
    }
    return "";
}

/* The name alone, without parameters. */
static std::string readable(const std::string &symbol) {
    int status = 0;
    char *const text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
    std::string s = text ? text : symbol;
    free(text);
    const size_t end = s.find('(');
    const bool is_hidden = s.compare(0, 21, "(anonymous namespace)") == 0;
    return is_hidden ? s : s.substr(0, end);
}

const char *fibers_name(void (*kernel)(void)) {
    static std::map<uintptr_t, std::string> names;
    const uintptr_t address = reinterpret_cast<uintptr_t>(kernel);
    std::string &name = names[address];
    if (name.empty()) {
        name = readable(find_symbol(address));
        char text[32];
        snprintf(text, sizeof(text), "at %p", reinterpret_cast<void *>(address));
        name = name.empty() ? text : name;
    }
    return name.c_str();
}

const char *fibers_kernel() {
    return fibers_name(b.launch->kernel);
}

const char *fibers_where() {
    static char text[120];
    snprintf(text, sizeof(text), "thread (%u,%u,%u) of block (%u,%u,%u)", threadIdx.x, threadIdx.y,
             threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    return text;
}
