/* Finds races in kernels: two threads of one launch touch the same byte, one of them writes, and
 * neither a barrier nor an atomic lies between. Whether the values come out right does not matter.
 *
 * Kernels are compiled with -fsanitize=thread, but not linked with it: the functions that the
 * compiler calls at each access are these. All other parts of the emulation are compiled without.
 *
 *   g++ -x c++ -std=c++11 -O1 -g -D__CUDACC__=1 -fsanitize=thread -Itests/emulation -I. -c part.cu
 *   g++ part.o runtime.o memory.o fibers.o cublas.o races.o ... (without -fsanitize=thread)
 *
 * What orders two accesses: the same thread; a __syncthreads between threads of a block; a __syncwarp
 * between lanes of a warp; between blocks, a __threadfence after the first access, where the second
 * one's block has used an atomic. Two atomics need no order. Of the readers of a word two are
 * remembered, of the writers one: some races show only in other orders, so try several seeds.
 */
#include "internal.h"

#undef emulation_race_atomic
#undef emulation_race_fence

#include <sys/mman.h>

#include <vector>

namespace {

struct access {
    uint64_t block;
    uint32_t time; /* in accesses, since the launch */
    uint16_t thread, barriers, warp_barriers;
    uint8_t bytes; /* mask, of the four of a word */
    bool is_atomic;
};

struct word {
    uint64_t launch, block; /* what follows is of this launch; shared memory: of this block */
    access write, read[2];
};

struct block_marks {
    uint64_t block;
    uint32_t fence; /* time of the last one */
};

const char *device_base;
word *device_words;
std::vector<word> shared_words;
std::vector<block_marks> marks; /* of the blocks of this launch, those that fenced */
uint64_t launch;
uint32_t now;
bool block_has_atomic;
uint64_t last_block;

void start_launch(const kernel_place &p) {
    launch = p.launch;
    now = 0;
    marks.clear();
    block_has_atomic = false;
    last_block = p.block;
}

bool is_shared(const char *at, const kernel_place &p) {
    return at >= p.shared && at < p.shared + p.shared_size;
}

/* Shadow of device memory: reserved once, and used where kernels touch memory. */
word *find_word(const char *at, const kernel_place &p) {
    if (is_shared(at, p)) {
        shared_words.resize(p.shared_size / 4 + 1);
        return &shared_words[static_cast<size_t>(at - p.shared) / 4];
    }
    if (memory_where(at) != MEMORY_DEVICE) {
        return nullptr;
    }
    if (!device_words) {
        size_t size = 0;
        device_base = memory_base(MEMORY_DEVICE, &size);
        void *const space = mmap(nullptr, size / 4 * sizeof(word), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space == MAP_FAILED) {
            perror("emulation: shadow memory");
            abort();
        }
        device_words = static_cast<word *>(space);
    }
    return &device_words[static_cast<size_t>(at - device_base) / 4];
}

bool is_published(const access &a) {
    for (size_t i = 0; i < marks.size(); i++) {
        if (marks[i].block == a.block && marks[i].fence > a.time) {
            return block_has_atomic;
        }
    }
    return false;
}

bool is_ordered(const access &a, const access &me) {
    if (a.block != me.block) {
        return is_published(a);
    }
    return a.thread == me.thread || a.barriers != me.barriers ||
           (a.thread / 32 == me.thread / 32 && a.warp_barriers != me.warp_barriers);
}

bool is_race(const access &a, const access &me) {
    return (a.bytes & me.bytes) && !(a.is_atomic && me.is_atomic) && !is_ordered(a, me);
}

void name_thread(const access &a, char *text, size_t size) {
    const uint64_t plane = static_cast<uint64_t>(gridDim.x) * gridDim.y;
    snprintf(text, size, "thread (%u,%u,%u) of block (%u,%u,%u)", a.thread % blockDim.x,
             a.thread / blockDim.x % blockDim.y, a.thread / blockDim.x / blockDim.y,
             static_cast<unsigned>(a.block % gridDim.x),
             static_cast<unsigned>(a.block / gridDim.x % gridDim.y),
             static_cast<unsigned>(a.block / plane));
}

[[noreturn]] void report(const access &a, bool a_writes, const access &me, bool i_write,
                         const char *at, const kernel_place &p) {
    char mine[100], other[100];
    name_thread(me, mine, sizeof(mine));
    name_thread(a, other, sizeof(other));
    emulation_die("kernel %s: race: %s %s %s memory at %p, which %s %s, and nothing orders the two",
                  fibers_kernel(), mine, i_write ? "writes" : "reads",
                  is_shared(at, p) ? "shared" : "device", static_cast<const void *>(at), other,
                  a_writes ? "wrote" : "read");
}

void remember_read(word *w, const access &me) {
    const bool is_first =
        w->read[0].bytes && w->read[0].block == me.block && w->read[0].thread == me.thread;
    if (!is_first && w->read[0].bytes) {
        w->read[1] = w->read[0];
    }
    w->read[0] = me;
}

void touch_word(word *w, access me, bool is_write, const char *at, const kernel_place &p) {
    const uint64_t block = is_shared(at, p) ? me.block : 0;
    if (w->launch != launch || w->block != block) {
        memset(static_cast<void *>(w), 0, sizeof(*w));
        w->launch = launch;
        w->block = block;
    }
    if (is_race(w->write, me)) {
        report(w->write, true, me, is_write, at, p);
    }
    if (!is_write) {
        remember_read(w, me);
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (is_race(w->read[i], me)) {
            report(w->read[i], false, me, true, at, p);
        }
    }
    w->write = me;
}

void touch(const void *pointer, size_t size, bool is_write, bool is_atomic) {
    kernel_place p;
    if (!fibers_place(&p)) {
        return;
    }
    const char *at = static_cast<const char *>(pointer);
    if (p.launch != launch) {
        start_launch(p);
    }
    if (p.block != last_block) {
        last_block = p.block;
        block_has_atomic = false;
    }
    block_has_atomic = block_has_atomic || is_atomic;
    now++;
    access me = {p.block, now, p.thread, p.barriers, p.warp_barriers, 0, is_atomic};
    while (size) {
        const size_t skip = reinterpret_cast<uintptr_t>(at) % 4;
        const size_t here = size < 4 - skip ? size : 4 - skip;
        word *const w = find_word(at, p);
        if (!w) {
            return;
        }
        me.bytes = static_cast<uint8_t>(((1u << here) - 1u) << skip);
        touch_word(w, me, is_write, at, p);
        at += here;
        size -= here;
    }
}

} // namespace

void emulation_race_atomic(const void *at, size_t size) {
    touch(at, size, true, true);
}

void emulation_race_fence(void) {
    kernel_place p;
    if (!fibers_place(&p)) {
        return;
    }
    if (p.launch != launch) {
        start_launch(p);
    }
    now++;
    for (size_t i = marks.size(); i-- > 0;) {
        if (marks[i].block == p.block) {
            marks[i].fence = now;
            return;
        }
    }
    const block_marks m = {p.block, now};
    marks.push_back(m);
}

/* ---- what the compiler calls ---- */

extern "C" {

#define RACES_ACCESS(name, size, is_write)                                                         \
    void name(void *at);                                                                           \
    void name(void *at) {                                                                          \
        touch(at, size, is_write, false);                                                          \
    }

RACES_ACCESS(__tsan_read1, 1, false)
RACES_ACCESS(__tsan_read2, 2, false)
RACES_ACCESS(__tsan_read4, 4, false)
RACES_ACCESS(__tsan_read8, 8, false)
RACES_ACCESS(__tsan_read16, 16, false)
RACES_ACCESS(__tsan_write1, 1, true)
RACES_ACCESS(__tsan_write2, 2, true)
RACES_ACCESS(__tsan_write4, 4, true)
RACES_ACCESS(__tsan_write8, 8, true)
RACES_ACCESS(__tsan_write16, 16, true)
RACES_ACCESS(__tsan_unaligned_read2, 2, false)
RACES_ACCESS(__tsan_unaligned_read4, 4, false)
RACES_ACCESS(__tsan_unaligned_read8, 8, false)
RACES_ACCESS(__tsan_unaligned_read16, 16, false)
RACES_ACCESS(__tsan_unaligned_write2, 2, true)
RACES_ACCESS(__tsan_unaligned_write4, 4, true)
RACES_ACCESS(__tsan_unaligned_write8, 8, true)
RACES_ACCESS(__tsan_unaligned_write16, 16, true)

void __tsan_read_range(void *at, size_t size);
void __tsan_write_range(void *at, size_t size);
void __tsan_init(void);
void __tsan_func_entry(void *caller);
void __tsan_func_exit(void);
void __tsan_vptr_update(void **at, void *value);
void __tsan_vptr_read(void **at);
unsigned char __tsan_atomic8_load(const volatile unsigned char *at, int order);

void __tsan_read_range(void *at, size_t size) {
    touch(at, size, false, false);
}

void __tsan_write_range(void *at, size_t size) {
    touch(at, size, true, false);
}

void __tsan_init(void) {
}

void __tsan_func_entry(void *) {
}

void __tsan_func_exit(void) {
}

void __tsan_vptr_update(void **, void *) {
}

void __tsan_vptr_read(void **) {
}

/* Of the guards of static variables. */
unsigned char __tsan_atomic8_load(const volatile unsigned char *at, int) {
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

} /* extern "C" */
