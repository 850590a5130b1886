/* The runtime: streams, events, copies, launches, graphs, errors. See cuda_runtime.h. */
#include "internal.h"

#include <pthread.h>
#include <unistd.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

/* ---- state ---- */

struct node {
    streams_function *function;
    streams_condition *is_ready; /* NULL: at once */
    std::vector<char> arguments;
    std::vector<size_t> after;
    uint64_t cost_ns;
};

struct graph {
    std::vector<node> nodes;
    uint64_t references;
};

struct executable {
    graph *body;
    streams_point last; /* launches of one executable follow each other */
    uint64_t last_ns;
};

typedef std::set<size_t> frontier; /* the nodes that come before what is queued next */

struct stream {
    int queue;
    bool is_blocking; /* waits for the legacy stream, and it for this one */
    uint64_t capture; /* 0: none */
    frontier nodes;
};

struct event {
    int number;
    bool has_time;
    uint64_t capture;
    frontier nodes;
};

struct capture {
    cudaStreamCaptureMode mode;
    uintptr_t origin;
    pthread_t thread;
    bool is_invalid;
    graph *body;
};

struct runtime {
    streams engine;
    std::map<uintptr_t, stream> all_streams;
    std::map<uintptr_t, event> all_events;
    std::map<uintptr_t, graph *> graphs;
    std::map<uintptr_t, executable> executables;
    std::map<uint64_t, capture> captures;
    std::map<void (*)(void), uint64_t> ran; /* kernels */
    uint64_t serial;
    emulation_device device;
    emulation_counts counts;
    bool in_host_function;
    const char *failed;
    uint64_t break_at; /* the operation that breaks the device; 0: none */
    bool is_broken;
};

const uintptr_t legacy = 1, per_thread = 2;

runtime *the;
thread_local cudaError_t last_error;
thread_local int current_device;

pthread_mutex_t mutex;
pthread_once_t mutex_once = PTHREAD_ONCE_INIT;
thread_local int lock_depth;

void make_mutex() {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attributes);
}

emulation_device default_device() {
    emulation_device d;
    memset(&d, 0, sizeof(d));
    snprintf(d.name, sizeof(d.name), "Emulated GPU");
    d.count = 1;
    d.compute_major = 9;
    d.multiprocessors = 4;
    d.driver_version = d.runtime_version = CUDART_VERSION;
    d.clock_khz = d.memory_clock_khz = 1000000;
    d.memory_bus_bits = 256;
    d.memory_bytes = UINT64_C(8) << 30;
    return d;
}

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

/* A handle is never used twice, and points nowhere. */
uintptr_t new_handle() {
    return 16 * ++the->serial;
}

template <typename T> uintptr_t key(T handle) {
    return reinterpret_cast<uintptr_t>(handle);
}

template <typename T>
typename std::map<uintptr_t, T>::mapped_type *find(std::map<uintptr_t, T> &all, uintptr_t handle) {
    const typename std::map<uintptr_t, T>::iterator i = all.find(handle);
    return i == all.end() ? nullptr : &i->second;
}

stream *find_stream(cudaStream_t handle) {
    return find(the->all_streams, handle ? key(handle) : legacy);
}

event *find_event(cudaEvent_t handle) {
    return find(the->all_events, key(handle));
}

void add_stream(uintptr_t handle, bool is_blocking) {
    stream s;
    s.queue = streams_create(&the->engine);
    s.is_blocking = is_blocking;
    s.capture = 0;
    the->all_streams[handle] = s;
}

void release(graph *g) {
    if (--g->references == 0) {
        delete g;
    }
}

/* ---- entry ---- */

cudaError_t enter(const char *name, cudaError_t injected = cudaErrorLaunchFailure) {
    if (the->in_host_function) {
        return fail(cudaErrorNotPermitted);
    }
    if (emulation_fails(name)) {
        return fail(injected);
    }
    if (the->is_broken) {
        return fail(cudaErrorIllegalAddress);
    }
    return fail(the->device.count ? cudaSuccess : cudaErrorNoDevice);
}

/* After whatever may have run work: host memory is open again. */
cudaError_t settle(bool is_done) {
    memory_set_mode(false);
    if (!is_done) {
        emulation_die("%s", the->engine.error);
    }
    return fail(the->is_broken ? cudaErrorIllegalAddress : cudaSuccess);
}

cudaError_t wait_for_all() {
    return settle(streams_finish_all(&the->engine));
}

/* ---- captures ---- */

bool is_capturing(const stream &s) {
    return s.capture != 0;
}

void invalidate(uint64_t id) {
    const std::map<uint64_t, capture>::iterator i = the->captures.find(id);
    if (i != the->captures.end()) {
        i->second.is_invalid = true;
    }
}

/* What cannot be captured, while something is: Global forbids it to all threads, ThreadLocal to the
 * thread that captures, Relaxed to nobody. */
cudaError_t refuse_in_capture() {
    for (std::map<uint64_t, capture>::iterator i = the->captures.begin(); i != the->captures.end();
         ++i) {
        const capture &c = i->second;
        if (c.mode == cudaStreamCaptureModeGlobal || (c.mode == cudaStreamCaptureModeThreadLocal &&
                                                      pthread_equal(c.thread, pthread_self()))) {
            i->second.is_invalid = true;
            return fail(cudaErrorStreamCaptureUnsupported);
        }
    }
    return cudaSuccess;
}

/* The legacy stream waits for blocking streams, captured ones too: that cannot be. */
cudaError_t refuse_implicit() {
    for (std::map<uintptr_t, stream>::iterator i = the->all_streams.begin();
         i != the->all_streams.end(); ++i) {
        if (i->second.is_blocking && is_capturing(i->second)) {
            invalidate(i->second.capture);
            return fail(cudaErrorStreamCaptureImplicit);
        }
    }
    return cudaSuccess;
}

cudaError_t add_node(stream &s, streams_condition *is_ready, streams_function *function,
                     const void *arguments, size_t size, uint64_t cost_ns) {
    capture &c = the->captures[s.capture];
    if (c.is_invalid) {
        return fail(cudaErrorStreamCaptureInvalidated);
    }
    node n;
    n.function = function;
    n.is_ready = is_ready;
    n.arguments.assign(static_cast<const char *>(arguments),
                       static_cast<const char *>(arguments) + size);
    n.after.assign(s.nodes.begin(), s.nodes.end());
    n.cost_ns = cost_ns;
    s.nodes.clear();
    s.nodes.insert(c.body->nodes.size());
    c.body->nodes.push_back(n);
    return cudaSuccess;
}

/* ---- queueing ---- */

/* The order between the legacy stream and the others. */
void order_with_legacy(stream &s) {
    stream &old = the->all_streams[legacy];
    streams *const e = &the->engine;
    if (&s != &old) {
        if (s.is_blocking) {
            streams_wait(e, s.queue, streams_mark(e, old.queue), e->queues[old.queue].time_ns);
        }
        return;
    }
    for (std::map<uintptr_t, stream>::iterator i = the->all_streams.begin();
         i != the->all_streams.end(); ++i) {
        if (&i->second != &s && i->second.is_blocking) {
            const int q = i->second.queue;
            streams_wait(e, s.queue, streams_mark(e, q), e->queues[q].time_ns);
        }
    }
}

/* ---- operations: what runs later ---- */

struct copy_arguments {
    void *to;
    const void *from;
    size_t size;
};

struct fill_arguments {
    void *to;
    size_t size;
    int value;
};

struct host_arguments {
    cudaHostFn_t function;
    void *data;
};

struct alignas(16) launch_arguments {
    kernel_launch launch;
};

void run_copy(void *, void *arguments) {
    const copy_arguments *const a = static_cast<const copy_arguments *>(arguments);
    if (!emulation_works()) {
        return;
    }
    memmove(memory_open(a->to), memory_open(a->from), a->size);
    the->counts.copies++;
}

/* The bytes follow the arguments. */
void run_staged(void *, void *arguments) {
    const copy_arguments *const a = static_cast<const copy_arguments *>(arguments);
    if (!emulation_works()) {
        return;
    }
    memcpy(memory_open(a->to), a + 1, a->size);
    the->counts.copies++;
}

void run_fill(void *, void *arguments) {
    const fill_arguments *const a = static_cast<const fill_arguments *>(arguments);
    if (!emulation_works()) {
        return;
    }
    memset(memory_open(a->to), a->value, a->size);
    the->counts.fills++;
}

void run_host(void *, void *arguments) {
    const host_arguments *const a = static_cast<const host_arguments *>(arguments);
    if (!emulation_works()) {
        return;
    }
    memory_set_mode(false);
    the->in_host_function = true;
    a->function(a->data);
    the->in_host_function = false;
}

uint64_t thread_count(const kernel_launch &l) {
    return static_cast<uint64_t>(l.grid.x) * l.grid.y * l.grid.z * l.block.x * l.block.y *
           l.block.z;
}

void run_kernel(void *, void *arguments) {
    const launch_arguments *const a = static_cast<const launch_arguments *>(arguments);
    if (!emulation_works()) {
        return;
    }
    memory_set_mode(true);
    the->ran[a->launch.kernel]++;
    the->counts.threads += thread_count(a->launch);
    fibers_run(&a->launch, a + 1);
}

/* In a random order that respects the dependencies. What waits for other processes is asked again. */
void run_graph(void *, void *arguments) {
    graph *const g = *static_cast<graph **>(arguments);
    std::vector<size_t> left(g->nodes.size()), ready;
    for (size_t i = 0; i < g->nodes.size(); i++) {
        left[i] = g->nodes[i].after.size();
        if (!left[i]) {
            ready.push_back(i);
        }
    }
    while (!ready.empty()) {
        const size_t pick =
            the->engine.seed ? static_cast<size_t>(streams_below(&the->engine, ready.size())) : 0;
        const size_t now = ready[pick];
        node &n = g->nodes[now];
        if (n.is_ready && !n.is_ready(nullptr, n.arguments.data())) {
            if (ready.size() == 1) {
                the->engine.idle();
            }
            ready.push_back(now); /* with seed 0 the others come first */
            ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
            continue;
        }
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(pick));
        n.function(nullptr, n.arguments.data());
        for (size_t i = 0; i < g->nodes.size(); i++) {
            for (size_t k = 0; k < g->nodes[i].after.size(); k++) {
                if (g->nodes[i].after[k] == now && --left[i] == 0) {
                    ready.push_back(i);
                }
            }
        }
    }
    release(g);
}

uint64_t copy_cost(size_t bytes) {
    return 3000 + bytes / 20; /* 20 GB/s */
}

uint64_t fill_cost(size_t bytes) {
    return 2000 + bytes / 1000;
}

/* ---- copies ---- */

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE, ON_HOST, WRONG };

bool has_pageable_access;

/* Whether a pointer is what the kind of a copy says. */
bool is_side(const void *pointer, size_t size, bool is_device) {
    const memory_kind where = memory_where(pointer);
    if (where == MEMORY_OTHER) {
        return pointer && (!is_device || has_pageable_access);
    }
    return (where == MEMORY_DEVICE) == is_device && memory_holds(where, pointer, size);
}

direction find_direction(const void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    const bool is_inferred = kind == cudaMemcpyDefault;
    const bool to_device = is_inferred
                               ? memory_where(to) == MEMORY_DEVICE
                               : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device =
        is_inferred ? memory_where(from) == MEMORY_DEVICE
                    : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (!is_side(to, size, to_device) || !is_side(from, size, from_device)) {
        return WRONG;
    }
    return to_device ? (from_device ? ON_DEVICE : TO_DEVICE) : from_device ? TO_HOST : ON_HOST;
}

bool is_pageable(const void *pointer) {
    const memory_kind where = memory_where(pointer);
    return where == MEMORY_HOST || where == MEMORY_OTHER;
}

cudaError_t queue_staged(cudaStream_t s, void *to, const void *from, size_t size) {
    std::vector<char> bytes(sizeof(copy_arguments) + size);
    const copy_arguments a = {to, nullptr, size};
    memcpy(bytes.data(), &a, sizeof(a));
    memcpy(bytes.data() + sizeof(a), from, size);
    return emulation_enqueue(s, run_staged, bytes.data(), bytes.size(), copy_cost(size));
}

cudaError_t wait_for(cudaStream_t handle) {
    the->counts.host_waits++;
    stream *const s = find_stream(handle);
    order_with_legacy(*s);
    return settle(streams_finish_queue(&the->engine, s->queue));
}

cudaError_t copy(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t handle,
                 bool is_async) {
    const stream *const s = find_stream(handle);
    if (!s) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (!size) {
        return cudaSuccess;
    }
    const direction d = find_direction(to, from, size, kind);
    if (d == WRONG) {
        return fail(cudaErrorInvalidValue);
    }
    const bool is_paged = d != ON_DEVICE && is_pageable(d == TO_DEVICE ? from : to);
    if (is_capturing(*s) && (is_paged || !is_async)) {
        invalidate(s->capture);
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    cudaError_t error = cudaSuccess;
    if (d == TO_DEVICE && is_paged) {
        error = is_async ? cudaSuccess : wait_for(handle);
        return error ? error : queue_staged(handle, to, from, size);
    }
    const copy_arguments a = {to, from, size};
    error = emulation_enqueue(handle, run_copy, &a, sizeof(a), copy_cost(size));
    const bool waits = is_paged || d == ON_HOST || (!is_async && d != ON_DEVICE);
    return error || !waits || is_capturing(*s) ? error : wait_for(handle);
}

cudaError_t fill(void *to, int value, size_t size, cudaStream_t handle) {
    if (!size) {
        return cudaSuccess;
    }
    if (!emulation_holds(to, size)) {
        return fail(cudaErrorInvalidValue);
    }
    const fill_arguments a = {to, size, value};
    return emulation_enqueue(handle, run_fill, &a, sizeof(a), fill_cost(size));
}

/* ---- launches ---- */

bool is_launchable(const dim3 &g, const dim3 &b) {
    return g.x && g.y && g.z && b.x && b.y && b.z && g.x <= 0x7FFFFFFFu && g.y <= 65535 &&
           g.z <= 65535 && b.x <= 1024 && b.y <= 1024 && b.z <= 64 &&
           static_cast<uint64_t>(b.x) * b.y * b.z <= 1024;
}

void forget_everything() {
    for (std::map<uintptr_t, graph *>::iterator i = the->graphs.begin(); i != the->graphs.end();
         ++i) {
        release(i->second);
    }
    for (std::map<uintptr_t, executable>::iterator i = the->executables.begin();
         i != the->executables.end(); ++i) {
        release(i->second.body);
    }
    for (std::map<uint64_t, capture>::iterator i = the->captures.begin(); i != the->captures.end();
         ++i) {
        delete i->second.body;
    }
    streams *const e = &the->engine;
    for (int i = 0; i < e->queue_count; i++) { /* launches hold graphs */
        for (uint64_t n = e->queues[i].done; n < e->queues[i].queued; n++) {
            const streams_operation *const o = streams_at(&e->queues[i], n);
            if (o->function == run_graph) {
                release(*static_cast<graph **>(o->arguments));
            }
        }
    }
    streams_close(e);
    delete the;
}

void idle() {
    usleep(50);
}

void start(uint64_t seed) {
    the = new runtime();
    streams_open(&the->engine, seed);
    the->engine.idle = idle;
    the->device = default_device();
    add_stream(legacy, false);
    add_stream(per_thread, true);
    memory_reset(seed);
    fibers_reset(seed);
    cublas_reset();
    if (nccl_reset) {
        nccl_reset();
    }
    last_error = cudaSuccess;
    current_device = 0;
}

} // namespace

void (*nccl_reset)();

/* ---- the lock ---- */

emulation_lock::emulation_lock() {
    pthread_once(&mutex_once, make_mutex);
    pthread_mutex_lock(&mutex);
    lock_depth++;
    if (!the) {
        const char *const seed = getenv("EMULATION_SEED");
        start(seed ? strtoull(seed, nullptr, 10) : 1);
    }
}

emulation_lock::~emulation_lock() {
    lock_depth--;
    pthread_mutex_unlock(&mutex);
}

void emulation_unlock_all() {
    for (; lock_depth; lock_depth--) {
        pthread_mutex_unlock(&mutex);
    }
}

bool emulation_fails(const char *name) {
    the->counts.calls++;
    if (streams_fails(&the->engine)) {
        the->failed = name;
        return true;
    }
    return false;
}

void emulation_go_on(cudaStream_t handle) {
    streams_ask(&the->engine, streams_mark(&the->engine, find_stream(handle)->queue));
    memory_set_mode(false);
}

void emulation_count_product() {
    the->counts.products++;
}

/* Asked by each operation that runs. */
bool emulation_works() {
    if (the->break_at && --the->break_at == 0) {
        the->is_broken = true;
    }
    return !the->is_broken;
}

bool emulation_holds(const void *pointer, size_t size) {
    return is_side(pointer, size, true);
}

bool emulation_is_captured(cudaStream_t stream) {
    return is_capturing(*find_stream(stream));
}

bool emulation_is_stream(cudaStream_t stream) {
    return find_stream(stream) != nullptr;
}

cudaError_t emulation_enqueue(cudaStream_t handle, streams_function *function,
                              const void *arguments, size_t size, uint64_t cost_ns) {
    return emulation_enqueue_when(handle, nullptr, function, arguments, size, cost_ns);
}

cudaError_t emulation_enqueue_when(cudaStream_t handle, streams_condition *is_ready,
                                   streams_function *function, const void *arguments, size_t size,
                                   uint64_t cost_ns) {
    stream *const s = find_stream(handle);
    if (!s) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (is_capturing(*s)) {
        return add_node(*s, is_ready, function, arguments, size, cost_ns);
    }
    const bool is_legacy = s == &the->all_streams[legacy];
    const cudaError_t implicit = is_legacy ? refuse_implicit() : cudaSuccess;
    if (implicit) {
        return implicit;
    }
    order_with_legacy(*s);
    return settle(streams_enqueue_when(&the->engine, s->queue, is_ready, function, nullptr,
                                       arguments, size, cost_ns));
}

cudaError_t emulation_launch(const cudaLaunchConfig_t *config, void (*kernel)(void),
                             void (*call)(const void *), const void *closure, size_t size) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaLaunchKernelEx");
    if (error) {
        return error;
    }
    launch_arguments a;
    a.launch.kernel = kernel;
    a.launch.call = call;
    a.launch.grid = config->gridDim;
    a.launch.block = config->blockDim;
    if (!kernel) {
        return fail(cudaErrorInvalidDeviceFunction);
    }
    if (!is_launchable(a.launch.grid, a.launch.block)) {
        return fail(cudaErrorInvalidConfiguration);
    }
    if (config->dynamicSmemBytes) {
        emulation_die("kernel %s: dynamic shared memory is not emulated", fibers_name(kernel));
    }
    if (!find_stream(config->stream)) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    std::vector<char> bytes(sizeof(a) + size);
    memcpy(bytes.data(), static_cast<const void *>(&a), sizeof(a));
    memcpy(bytes.data() + sizeof(a), closure, size);
    the->counts.launches++;
    return emulation_enqueue(config->stream, run_kernel, bytes.data(), bytes.size(),
                             2000 + thread_count(a.launch) / 16);
}

/* ---- errors and versions ---- */

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof(error_texts) / sizeof(error_texts[0]); i++) {
        if (error_texts[i].error == error) {
            return error_texts[i].name;
        }
    }
    return error == cudaErrorUnknown ? "cudaErrorUnknown" : "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof(error_texts) / sizeof(error_texts[0]); i++) {
        if (error_texts[i].error == error) {
            return error_texts[i].text;
        }
    }
    return error == cudaErrorUnknown ? "unknown error" : "unrecognized error code";
}

cudaError_t cudaGetLastError(void) {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    const emulation_lock lock;
    *version = the->device.runtime_version;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    const emulation_lock lock;
    *version = the->device.driver_version;
    return cudaSuccess;
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    const emulation_lock lock;
    *count = 0;
    const cudaError_t error = enter("cudaGetDeviceCount");
    *count = error ? 0 : the->device.count;
    return error;
}

cudaError_t cudaGetDevice(int *device) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaGetDevice");
    if (!error) {
        *device = current_device;
    }
    return error;
}

cudaError_t cudaSetDevice(int device) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaSetDevice");
    if (error) {
        return error;
    }
    if (device < 0 || device >= the->device.count) {
        return fail(cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaGetDeviceProperties");
    const emulation_device &d = the->device;
    if (error || device < 0 || device >= d.count) {
        return error ? error : fail(cudaErrorInvalidDevice);
    }
    memset(p, 0, sizeof(*p));
    memcpy(p->name, d.name, sizeof(p->name));
    p->totalGlobalMem = static_cast<size_t>(d.memory_bytes);
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerMultiprocessor = 100 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7FFFFFFF;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = d.compute_major;
    p->minor = d.compute_minor;
    p->multiProcessorCount = d.multiprocessors;
    p->integrated = d.is_integrated;
    p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1;
    p->asyncEngineCount = 2;
    p->memoryBusWidth = d.memory_bus_bits;
    p->l2CacheSize = 4 << 20;
    p->maxThreadsPerMultiProcessor = 1536;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaDeviceGetAttribute");
    const emulation_device &d = the->device;
    if (error || device < 0 || device >= d.count) {
        return error ? error : fail(cudaErrorInvalidDevice);
    }
    const struct {
        cudaDeviceAttr attribute;
        int value;
    } all[] = {{cudaDevAttrMaxThreadsPerBlock, 1024},
               {cudaDevAttrMaxGridDimX, 0x7FFFFFFF},
               {cudaDevAttrMaxGridDimY, 65535},
               {cudaDevAttrMaxGridDimZ, 65535},
               {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
               {cudaDevAttrWarpSize, 32},
               {cudaDevAttrClockRate, d.clock_khz},
               {cudaDevAttrMultiProcessorCount, d.multiprocessors},
               {cudaDevAttrIntegrated, d.is_integrated},
               {cudaDevAttrConcurrentKernels, 1},
               {cudaDevAttrMemoryClockRate, d.memory_clock_khz},
               {cudaDevAttrGlobalMemoryBusWidth, d.memory_bus_bits},
               {cudaDevAttrL2CacheSize, 4 << 20},
               {cudaDevAttrMaxThreadsPerMultiProcessor, 1536},
               {cudaDevAttrAsyncEngineCount, 2},
               {cudaDevAttrUnifiedAddressing, 1},
               {cudaDevAttrComputeCapabilityMajor, d.compute_major},
               {cudaDevAttrComputeCapabilityMinor, d.compute_minor},
               {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 100 << 10},
               {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (all[i].attribute == attribute) {
            *value = all[i].value;
            return cudaSuccess;
        }
    }
    return fail(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceSynchronize(void) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaDeviceSynchronize");
    error = error ? error : refuse_in_capture();
    if (error) {
        return error;
    }
    the->counts.host_waits++;
    return wait_for_all();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaMemGetInfo");
    if (error) {
        return error;
    }
    const uint64_t used = the->device.used_bytes + memory_charged();
    *total_bytes = static_cast<size_t>(the->device.memory_bytes);
    *free_bytes =
        used < the->device.memory_bytes ? static_cast<size_t>(the->device.memory_bytes - used) : 0;
    return cudaSuccess;
}

/* ---- memory ---- */

extern "C" cudaError_t cudaMalloc(void **pointer, size_t size) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaMalloc", cudaErrorMemoryAllocation);
    error = error ? error : refuse_in_capture();
    if (error) {
        return error;
    }
    *pointer = nullptr;
    if (!size) {
        return cudaSuccess;
    }
    const uint64_t used = the->device.used_bytes + memory_charged();
    if (size > the->device.memory_bytes || used + memory_charge(size) > the->device.memory_bytes ||
        !(*pointer = memory_allocate(MEMORY_DEVICE, size, false))) {
        return fail(cudaErrorMemoryAllocation);
    }
    const uint64_t bytes = memory_bytes(MEMORY_DEVICE);
    the->counts.device_peak_bytes =
        bytes > the->counts.device_peak_bytes ? bytes : the->counts.device_peak_bytes;
    return cudaSuccess;
}

static cudaError_t free_memory(memory_kind kind, void *pointer) {
    const emulation_lock lock;
    const cudaError_t error = pointer ? refuse_in_capture() : cudaSuccess;
    if (error || !pointer) {
        return error;
    }
    the->counts.host_waits += the->engine.pending > 0;
    wait_for_all();
    if (!memory_release(kind, pointer)) {
        return fail(cudaErrorInvalidValue);
    }
    return fail(the->is_broken ? cudaErrorIllegalAddress : cudaSuccess);
}

cudaError_t cudaFree(void *pointer) {
    return free_memory(MEMORY_DEVICE, pointer);
}

cudaError_t cudaFreeHost(void *pointer) {
    return free_memory(MEMORY_PINNED, pointer);
}

static cudaError_t allocate_pinned(const char *name, void **pointer, size_t size, unsigned flags) {
    const emulation_lock lock;
    cudaError_t error = enter(name, cudaErrorMemoryAllocation);
    error = error ? error : refuse_in_capture();
    if (error) {
        return error;
    }
    *pointer = nullptr;
    if (size && !(*pointer = memory_allocate(MEMORY_PINNED, size, flags & cudaHostAllocMapped))) {
        return fail(cudaErrorMemoryAllocation);
    }
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    return allocate_pinned("cudaHostAlloc", pointer, size, flags);
}

extern "C" cudaError_t cudaMallocHost(void **pointer, size_t size) {
    return allocate_pinned("cudaMallocHost", pointer, size, 0);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t count, enum cudaMemcpyKind kind) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaMemcpy");
    error = error ? error : refuse_in_capture();
    return error ? error : copy(to, from, count, kind, nullptr, false);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaMemcpyAsync");
    return error ? error : copy(to, from, count, kind, stream, true);
}

cudaError_t cudaMemset(void *to, int value, size_t count) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaMemset");
    return error ? error : fill(to, value, count, nullptr);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t count, cudaStream_t stream) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaMemsetAsync");
    return error ? error : fill(to, value, count, stream);
}

/* ---- streams ---- */

static cudaError_t create_stream(const char *name, cudaStream_t *handle, unsigned flags) {
    const emulation_lock lock;
    const cudaError_t error = enter(name);
    if (error) {
        return error;
    }
    if (!handle || flags > cudaStreamNonBlocking) {
        return fail(cudaErrorInvalidValue);
    }
    const uintptr_t n = new_handle();
    add_stream(n, flags == cudaStreamDefault);
    *handle = reinterpret_cast<cudaStream_t>(n);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return create_stream("cudaStreamCreate", stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return create_stream("cudaStreamCreateWithFlags", stream, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return create_stream("cudaStreamCreateWithPriority", stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return error;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    const emulation_lock lock;
    stream *const s = find_stream(handle);
    if (!s || !handle || key(handle) <= per_thread) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    invalidate(s->capture);
    streams_destroy(&the->engine, s->queue);
    the->all_streams.erase(key(handle));
    return cudaSuccess;
}

/* Waiting for a stream, and asking it, are errors while it captures. */
static cudaError_t check_wait(cudaStream_t handle) {
    const stream *const s = find_stream(handle);
    if (!s) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (is_capturing(*s)) {
        invalidate(s->capture);
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    return s == &the->all_streams[legacy] ? refuse_implicit() : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaStreamSynchronize");
    error = error ? error : check_wait(handle);
    return error ? error : wait_for(handle);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaStreamQuery");
    error = error ? error : check_wait(handle);
    if (error) {
        return error;
    }
    const stream *const s = find_stream(handle);
    const bool is_done = streams_ask(&the->engine, streams_mark(&the->engine, s->queue));
    memory_set_mode(false);
    return is_done ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaStreamWaitEvent");
    stream *const s = find_stream(handle);
    const event *const v = find_event(event_handle);
    if (error || !s || !v || flags) {
        return error ? error : fail(flags ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    }
    const bool is_live = v->capture && the->captures.count(v->capture);
    if (is_live && s->capture && s->capture != v->capture) {
        invalidate(s->capture);
        invalidate(v->capture);
        return fail(cudaErrorStreamCaptureMerge);
    }
    if (is_live) { /* the stream joins the capture */
        if (s == &the->all_streams[legacy]) {
            invalidate(v->capture);
            return fail(cudaErrorStreamCaptureImplicit);
        }
        s->capture = v->capture;
        s->nodes.insert(v->nodes.begin(), v->nodes.end());
        return cudaSuccess;
    }
    if (v->capture) {
        return fail(cudaErrorCapturedEvent);
    }
    if (s->capture) {
        invalidate(s->capture);
        return fail(cudaErrorStreamCaptureIsolation);
    }
    order_with_legacy(*s);
    return settle(streams_event_wait(&the->engine, s->queue, v->number));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaLaunchHostFunc");
    if (error || !function) {
        return error ? error : fail(cudaErrorInvalidValue);
    }
    const host_arguments a = {function, data};
    return emulation_enqueue(stream, run_host, &a, sizeof(a), 1000);
}

/* ---- events ---- */

static cudaError_t create_event(const char *name, cudaEvent_t *handle, unsigned flags) {
    const emulation_lock lock;
    const cudaError_t error = enter(name);
    if (error || !handle || flags > 3) {
        return error ? error : fail(cudaErrorInvalidValue);
    }
    event v;
    v.number = streams_event_create(&the->engine);
    v.has_time = !(flags & cudaEventDisableTiming);
    v.capture = 0;
    const uintptr_t n = new_handle();
    the->all_events[n] = v;
    *handle = reinterpret_cast<cudaEvent_t>(n);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return create_event("cudaEventCreate", event, 0);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return create_event("cudaEventCreateWithFlags", event, flags);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    const emulation_lock lock;
    const event *const v = find_event(handle);
    if (!v) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    streams_event_destroy(&the->engine, v->number);
    the->all_events.erase(key(handle));
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaEventRecord");
    event *const v = find_event(handle);
    stream *const s = find_stream(stream_handle);
    if (error || !v || !s) {
        return error ? error : fail(cudaErrorInvalidResourceHandle);
    }
    if (is_capturing(*s)) {
        v->capture = s->capture;
        v->nodes = s->nodes;
        return cudaSuccess;
    }
    const cudaError_t implicit = s == &the->all_streams[legacy] ? refuse_implicit() : cudaSuccess;
    if (implicit) {
        return implicit;
    }
    order_with_legacy(*s);
    v->capture = 0;
    streams_event_record(&the->engine, v->number, s->queue);
    return cudaSuccess;
}

/* Of an event that the host waits for or asks. */
static cudaError_t check_event(const event *v) {
    if (!v) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (v->capture) {
        invalidate(v->capture);
        return fail(cudaErrorCapturedEvent);
    }
    return refuse_in_capture();
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaEventQuery");
    const event *const v = find_event(handle);
    error = error ? error : check_event(v);
    if (error) {
        return error;
    }
    streams *const e = &the->engine;
    const bool is_done =
        streams_event_is_done(e, v->number) || streams_ask(e, e->events[v->number].point);
    memory_set_mode(false);
    return is_done ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaEventSynchronize");
    const event *const v = find_event(handle);
    error = error ? error : check_event(v);
    if (error) {
        return error;
    }
    the->counts.host_waits++;
    return settle(streams_finish_event(&the->engine, v->number));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaEventElapsedTime");
    const event *const a = find_event(start_handle), *const b = find_event(end_handle);
    if (error || !a || !b || !a->has_time || !b->has_time || a->capture || b->capture) {
        return error ? error : fail(cudaErrorInvalidResourceHandle);
    }
    const streams *const e = &the->engine;
    const streams_event &from = e->events[a->number], &to = e->events[b->number];
    if (!from.is_recorded || !to.is_recorded) {
        return fail(cudaErrorInvalidResourceHandle);
    }
    if (!streams_event_is_done(e, a->number) || !streams_event_is_done(e, b->number)) {
        return fail(cudaErrorNotReady);
    }
    *ms = static_cast<float>((static_cast<double>(to.time_ns) - static_cast<double>(from.time_ns)) *
                             1e-6);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaStreamBeginCapture");
    stream *const s = find_stream(handle);
    if (error || !s) {
        return error ? error : fail(cudaErrorInvalidResourceHandle);
    }
    if (s == &the->all_streams[legacy]) {
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if (is_capturing(*s)) {
        return fail(cudaErrorIllegalState);
    }
    capture c;
    c.mode = mode;
    c.origin = key(handle);
    c.thread = pthread_self();
    c.is_invalid = false;
    c.body = new graph();
    s->capture = ++the->serial;
    s->nodes.clear();
    the->captures[s->capture] = c;
    return cudaSuccess;
}

/* Whether all that was captured comes before what the origin would queue next. */
static bool is_joined(const graph &g, const frontier &last) {
    std::vector<bool> is_followed(g.nodes.size());
    for (size_t i = 0; i < g.nodes.size(); i++) {
        for (size_t k = 0; k < g.nodes[i].after.size(); k++) {
            is_followed[g.nodes[i].after[k]] = true;
        }
    }
    for (size_t i = 0; i < g.nodes.size(); i++) {
        if (!is_followed[i] && !last.count(i)) {
            return false;
        }
    }
    return true;
}

static void leave_capture(uint64_t id) {
    for (std::map<uintptr_t, stream>::iterator i = the->all_streams.begin();
         i != the->all_streams.end(); ++i) {
        if (i->second.capture == id) {
            i->second.capture = 0;
            i->second.nodes.clear();
        }
    }
    the->captures.erase(id);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph_handle) {
    const emulation_lock lock;
    const cudaError_t injected = enter("cudaStreamEndCapture");
    stream *const s = find_stream(handle);
    *graph_handle = nullptr;
    if (!s || !is_capturing(*s)) {
        return injected ? injected
                        : fail(s ? cudaErrorIllegalState : cudaErrorInvalidResourceHandle);
    }
    const uint64_t id = s->capture;
    const capture c = the->captures[id];
    if (c.origin != key(handle)) {
        invalidate(id);
        return fail(cudaErrorStreamCaptureUnmatched);
    }
    if (c.mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c.thread, pthread_self())) {
        return fail(cudaErrorStreamCaptureWrongThread);
    }
    const cudaError_t error = c.is_invalid                    ? cudaErrorStreamCaptureInvalidated
                              : injected                      ? injected
                              : !is_joined(*c.body, s->nodes) ? cudaErrorStreamCaptureUnjoined
                                                              : cudaSuccess;
    leave_capture(id);
    if (error) {
        delete c.body;
        return fail(error);
    }
    c.body->references = 1;
    const uintptr_t n = new_handle();
    the->graphs[n] = c.body;
    *graph_handle = reinterpret_cast<cudaGraph_t>(n);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaStreamIsCapturing");
    const stream *const s = find_stream(handle);
    if (error || !s) {
        return error ? error : fail(cudaErrorInvalidResourceHandle);
    }
    *status = !s->capture                            ? cudaStreamCaptureStatusNone
              : the->captures[s->capture].is_invalid ? cudaStreamCaptureStatusInvalidated
                                                     : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph_handle,
                                 unsigned long long) {
    const emulation_lock lock;
    const cudaError_t error = enter("cudaGraphInstantiate", cudaErrorMemoryAllocation);
    graph **const g = find(the->graphs, key(graph_handle));
    if (error || !g || !exec) {
        return error ? error : fail(cudaErrorInvalidValue);
    }
    executable x;
    x.body = *g;
    x.body->references++;
    x.last.queue = 0;
    x.last.position = 0;
    x.last_ns = 0;
    const uintptr_t n = new_handle();
    the->executables[n] = x;
    *exec = reinterpret_cast<cudaGraphExec_t>(n);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    const emulation_lock lock;
    cudaError_t error = enter("cudaGraphLaunch");
    executable *const x = find(the->executables, key(exec));
    stream *const s = find_stream(handle);
    if (error || !x || !s) {
        return error ? error : fail(s ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    }
    if (is_capturing(*s)) {
        invalidate(s->capture);
        return fail(cudaErrorNotSupported);
    }
    uint64_t cost = 5000;
    for (size_t i = 0; i < x->body->nodes.size(); i++) {
        cost += x->body->nodes[i].cost_ns;
    }
    streams *const e = &the->engine;
    streams_wait(e, s->queue, x->last, x->last_ns);
    x->body->references++;
    error = emulation_enqueue(handle, run_graph, &x->body, sizeof(x->body), cost);
    if (error) {
        x->body->references--;
        return error;
    }
    x->last = streams_mark(e, s->queue);
    x->last_ns = e->queues[s->queue].time_ns;
    the->counts.graph_launches++;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    const emulation_lock lock;
    graph **const g = find(the->graphs, key(handle));
    if (!g) {
        return fail(cudaErrorInvalidValue);
    }
    release(*g);
    the->graphs.erase(key(handle));
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    const emulation_lock lock;
    const executable *const x = find(the->executables, key(handle));
    if (!x) {
        return fail(cudaErrorInvalidValue);
    }
    the->counts.graphs_cut_off += !streams_is_done(&the->engine, x->last);
    release(x->body);
    the->executables.erase(key(handle));
    return cudaSuccess;
}

/* ---- emulation.h ---- */

void emulation_reset(uint64_t seed) {
    const emulation_lock lock;
    forget_everything();
    start(seed);
}

void emulation_set_pageable_access(bool is_allowed) {
    const emulation_lock lock;
    has_pageable_access = is_allowed;
}

emulation_device emulation_get_device(void) {
    const emulation_lock lock;
    return the->device;
}

void emulation_set_device(const emulation_device *device) {
    const emulation_lock lock;
    the->device = *device;
}

void emulation_fail(uint64_t n) {
    const emulation_lock lock;
    the->engine.fail_at = n;
    the->failed = nullptr;
}

void emulation_break(uint64_t n) {
    const emulation_lock lock;
    the->break_at = n;
}

bool emulation_is_broken(void) {
    const emulation_lock lock;
    return the->is_broken;
}

const char *emulation_failed(void) {
    const emulation_lock lock;
    return the->failed;
}

emulation_counts emulation_count(void) {
    const emulation_lock lock;
    emulation_counts c = the->counts;
    c.device_bytes = memory_bytes(MEMORY_DEVICE);
    c.pinned_bytes = memory_bytes(MEMORY_PINNED);
    c.device_allocations = memory_allocations(MEMORY_DEVICE);
    c.pinned_allocations = memory_allocations(MEMORY_PINNED);
    c.host_allocations = memory_allocations(MEMORY_HOST);
    c.streams = the->all_streams.size() - 2;
    c.events = the->all_events.size();
    c.graphs = the->graphs.size();
    c.graph_execs = the->executables.size();
    c.handles = cublas_handles();
    c.pending = the->engine.pending;
    return c;
}

uint64_t emulation_launches(const char *kernel) {
    const emulation_lock lock;
    uint64_t sum = 0;
    for (std::map<void (*)(void), uint64_t>::iterator i = the->ran.begin(); i != the->ran.end();
         ++i) {
        sum += !kernel || strcmp(kernel, fibers_name(i->first)) == 0 ? i->second : 0;
    }
    return sum;
}

uint64_t emulation_time_ns(void) {
    const emulation_lock lock;
    return the->engine.time_ns;
}

void emulation_finish(void) {
    const emulation_lock lock;
    wait_for_all();
}
