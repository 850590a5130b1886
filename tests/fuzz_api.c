/*  fuzz_api.c - sequences of calls of the public interface, decoded from bytes: models of random
    configs, tensors and layers, wrong handles and masks among them, in any order, with failing
    allocations, backend calls and callbacks. The callbacks touch every byte that they are entitled
    to. What must hold is checked on the way; a sanitizer looks at the rest.

    With clang's fuzzer (make fuzz) this is LLVMFuzzerTestOneInput; without FUZZ_LIBRARY, a program
    that runs the files it is given; with -v it tells what is called. */
#include "private.h"

#include "fuzz_check.h"
#include "plan_files.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODELS = 2, TENSORS = 96, LAYERS = 20, LENT = 16, CALLS = 80, VALUES = 24 };
enum { LARGEST_BLOCK = 16 << 20, CALLBACK_ERROR = 3, SPANS = 128 };
enum { GROUPS = 6, UPDATES = 8, FILE_BYTES = 1 << 16 };

static bool is_traced; // with -v: every call, its result and the plans

static void trace(const char *format, ...) {
    va_list arguments;
    if (is_traced) {
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
        fflush(stdout);
    }
}

// ------------------------------------------------------------------------------------------------
// what happens in one input

typedef enum tensor_kind {
    KIND_INPUT,
    KIND_PARAM,
    KIND_BUFFER,
    KIND_ACTIVATION,
    KIND_SAVED,
    KIND_COUNT
} tensor_kind;

struct slot;

typedef struct layer_info {
    struct slot *owner;
    ms_layer_desc desc;
    ms_layer handle;
    const ms_call *bound; // what bind was given
} layer_info;

typedef struct lent {
    ms_tensor tensor;
    float *memory;
    uint64_t bytes;
    bool is_gradient;
} lent;

/* What update callbacks of an optimizer are given. */
typedef struct update_info {
    struct slot *owner;
    uint64_t bytes; // of workspace for each element
} update_info;

/* A file in memory, with room for what is changed in it. */
typedef struct file_image {
    uint8_t data[FILE_BYTES + 16];
    size_t bytes;
} file_image;

/* A model and what was registered with it. */
typedef struct slot {
    struct world *world;
    ms_model *model;
    ms_config config;
    uint8_t answer; // of its policy
    ms_tensor tensors[TENSORS];
    tensor_kind kinds[TENSORS];
    uint32_t tensor_count;
    layer_info layers[LAYERS];
    uint32_t layer_count;
    ms_tensor values[VALUES]; // of one shape: they can be read by the next layer
    uint32_t value_count;
    ms_shape shape;
    ms_axis axes[MS_LIMIT_AXES];
    int64_t largest[MS_LIMIT_AXES]; // of evals
    ms_param_group groups[GROUPS];
    uint32_t group_count;
    update_info updates[UPDATES];
    uint32_t update_count;
    uint32_t axis_count;
    lent loans[LENT];
    uint32_t loan_count;
    bool has_refused; // a registration error, which sticks
    bool may_refuse;  // there may be one that was not told
    bool has_plan;    // wrapped at least once
    void *image;      // memory that a suspended model was given, if any
} slot;

typedef struct world {
    const uint8_t *data;
    size_t size, at;
    uint64_t live_blocks, live_bytes;
    uint64_t allocation_fails_in, backend_fails_in, callback_fails_in; // 0: never
    uint64_t faults;
    bool reenters;          // callbacks call what they may not
    double now_us, look_us; // the clock moves when it is read: less in slices than when measuring
    ms_backend cpu;
    ms_arena *arena;
    file_image plan, run; // what ms_plan_save and ms_save have written last
    slot slots[MODELS];
    uint32_t current;
} world;

static uint8_t take(world *w) {
    return w->at < w->size ? w->data[w->at++] : 0;
}

static uint32_t below(world *w, uint32_t count) {
    return take(w) % count;
}

/* False once the input is used up. */
static bool one_in(world *w, uint32_t count) {
    return take(w) % count == count - 1;
}

static bool counts_down(world *w, uint64_t *left) {
    if (*left == 0 || --*left != 0) {
        return false;
    }
    w->faults += 1;
    return true;
}

// ------------------------------------------------------------------------------------------------
// host memory and backend, both of which may fail

typedef struct block {
    uint64_t bytes, mark;
} block;

enum { BLOCK_MARK = 0x600dcafe };

static void *world_alloc(uint64_t bytes, void *user) {
    world *w = (world *)user;
    if (counts_down(w, &w->allocation_fails_in)) {
        return NULL;
    }
    if (bytes > LARGEST_BLOCK) {
        w->faults += 1;
        return NULL;
    }
    block *b = (block *)malloc(sizeof *b + (size_t)bytes);
    CHECK(b != NULL);
    b->bytes = bytes;
    b->mark = BLOCK_MARK;
    memset(b + 1, 0xa5, (size_t)bytes);
    w->live_blocks += 1;
    w->live_bytes += bytes;
    return b + 1;
}

static void world_release(void *memory, uint64_t bytes, void *user) {
    world *w = (world *)user;
    if (memory == NULL) {
        return;
    }
    block *b = (block *)memory - 1;
    CHECK(b->mark == BLOCK_MARK && b->bytes == bytes);
    b->mark = 0;
    w->live_blocks -= 1;
    w->live_bytes -= bytes;
    free(b);
}

static int backend_fails(void *user) {
    world *w = (world *)user;
    return counts_down(w, &w->backend_fails_in) ? 9 : 0;
}

#define CPU (&((world *)user)->cpu)

static int fz_memory_alloc(void *user, const ms_allocator *host, uint64_t bytes, void **device) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->memory_alloc(CPU->user, host, bytes, device);
}

static void fz_memory_release(void *user, const ms_allocator *host, void *device, uint64_t bytes) {
    CPU->memory_release(CPU->user, host, device, bytes);
}

static int fz_copy_in(void *user, void *device, const void *host, uint64_t bytes) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->copy_in(CPU->user, device, host, bytes);
}

static int fz_copy_out(void *user, void *host, const void *device, uint64_t bytes) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->copy_out(CPU->user, host, device, bytes);
}

static int fz_copy(void *user, void *device, const void *source, uint64_t bytes) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->copy(CPU->user, device, source, bytes);
}

static int fz_fill_bytes(void *user, void *device, uint8_t value, uint64_t bytes) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->fill_bytes(CPU->user, device, value, bytes);
}

static int fz_fill_f32(void *user, void *device, float value, uint64_t count) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->fill_f32(CPU->user, device, value, count);
}

static int fz_scale_f32(void *user, void *device, const float *factor, uint64_t count) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->scale_f32(CPU->user, device, factor, count);
}

static int fz_add(void *user, void *target, ms_dtype to, const void *source, ms_dtype from,
                  uint64_t count) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->add(CPU->user, target, to, source, from, count);
}

static int fz_loss(void *user, const void *losses, uint64_t count, double factor,
                   ms_step_state *step) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->loss(CPU->user, losses, count, factor, step);
}

static int fz_add_squares(void *user, const void *device, ms_dtype dtype, uint64_t count,
                          double *sum, uint32_t number, uint32_t *nonfinite) {
    int error = backend_fails(user);
    return error != 0 ? error
                      : CPU->add_squares(CPU->user, device, dtype, count, sum, number, nonfinite);
}

static int fz_clip_scale(void *user, ms_norm *norms, const float *limits, uint32_t count,
                         ms_step_state *step, ms_update_factors *factors, uint64_t factor_count) {
    int error = backend_fails(user);
    return error != 0
               ? error
               : CPU->clip_scale(CPU->user, norms, limits, count, step, factors, factor_count);
}

static int fz_update(void *user, const ms_update_args *args) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->update(CPU->user, args);
}

static int fz_factor(void *user, const ms_factor_args *args) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->factor(CPU->user, args);
}

static int fz_gemm(void *user, float alpha, const ms_matrix *a, const ms_matrix *b, float beta,
                   const ms_matrix *c) {
    int error = backend_fails(user);
    return error != 0 ? error : CPU->gemm(CPU->user, alpha, a, b, beta, c);
}

static void fz_hardware(void *user, ms_hardware *hardware) {
    (void)user;
    hardware->free_bytes = hardware->total_bytes = 1 << 20; // reading /proc takes its time
}

static ms_backend world_backend(world *w) {
    ms_backend b = w->cpu;
    b.name = "fuzz";
    b.user = w;
    b.memory_alloc = fz_memory_alloc;
    b.memory_release = fz_memory_release;
    b.copy_in = fz_copy_in;
    b.copy_out = fz_copy_out;
    b.copy = fz_copy;
    b.fill_bytes = fz_fill_bytes;
    b.fill_f32 = fz_fill_f32;
    b.scale_f32 = fz_scale_f32;
    b.add = fz_add;
    b.loss = fz_loss;
    b.add_squares = fz_add_squares;
    b.clip_scale = fz_clip_scale;
    b.update = fz_update;
    b.factor = fz_factor;
    b.gemm = fz_gemm;
    b.hardware = fz_hardware;
    return b;
}

static ms_allocator world_allocator(world *w) {
    ms_allocator a;
    memset(&a, 0, sizeof a);
    a.alloc = world_alloc;
    a.release = world_release;
    a.user = w;
    return a;
}

static double world_clock(void *user) {
    world *w = (world *)user;
    w->now_us += w->look_us;
    return w->now_us;
}

static void hear(ms_log_level level, const char *tag, const char *text, void *user) {
    CHECK(user != NULL && level >= MS_LOG_ERROR && level <= MS_LOG_DEBUG);
    CHECK(tag != NULL && tag[0] != 0 && text != NULL && text[0] != 0);
    CHECK(strchr(text, '\n') == NULL);
}

// ------------------------------------------------------------------------------------------------
// bytes of operands: read all of them, write all of them

static uint64_t mixed(uint64_t h) {
    h ^= h >> 31;
    h *= 0x7fb5d329728ea185u;
    h ^= h >> 27;
    h *= 0x81dadef4bc2dd44du;
    return h ^ h >> 33;
}

static size_t view_bytes(const ms_view *view) {
    return (size_t)(ms_shape_count(&view->shape) * ms_dtype_bytes(view->dtype));
}

static uint64_t digest(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; ++i) {
        h = (h ^ p[i]) * 0x100000001b3u;
    }
    return mixed(h);
}

static float unit(uint64_t h) {
    return (float)((int32_t)(mixed(h) & 0xffff) - 0x8000) / 65536.0f;
}

/* Element i of an array of floats, in 16 or 32 bits. */
static float element(const void *data, ms_dtype dtype, uint64_t i) {
    return dtype == MS_DTYPE_BF16  ? msi_f32_of_bf16(((const uint16_t *)data)[i])
           : dtype == MS_DTYPE_F16 ? msi_f32_of_f16(((const uint16_t *)data)[i])
                                   : ((const float *)data)[i];
}

static void set_element(void *data, ms_dtype dtype, uint64_t i, float x) {
    if (dtype == MS_DTYPE_BF16) {
        ((uint16_t *)data)[i] = msi_bf16_of_f32(x);
    } else if (dtype == MS_DTYPE_F16) {
        ((uint16_t *)data)[i] = msi_f16_of_f32(x);
    } else {
        ((float *)data)[i] = x;
    }
}

/* Values that depend on h alone; what is there is overwritten or, with add, added to. */
static void put(void *data, ms_dtype dtype, size_t bytes, uint64_t h, bool add) {
    if (dtype == MS_DTYPE_F32) {
        float *f = (float *)data;
        for (size_t i = 0; i < bytes / 4; ++i) {
            f[i] = (add ? f[i] : 0.0f) + unit(h + i);
        }
    } else if (dtype == MS_DTYPE_BF16 || dtype == MS_DTYPE_F16) {
        for (size_t i = 0; i < bytes / 2; ++i) {
            uint16_t rounded;
            set_element(&rounded, dtype, 0, unit(h + i));
            const float x = element(&rounded, dtype, 0);
            set_element(data, dtype, i, add ? element(data, dtype, i) + x : x);
        }
    } else if (dtype == MS_DTYPE_F64) {
        double *d = (double *)data;
        for (size_t i = 0; i < bytes / 8; ++i) {
            d[i] = (add ? d[i] : 0.0) + (double)unit(h + i);
        }
    } else {
        unsigned char *p = (unsigned char *)data;
        for (size_t i = 0; i < bytes; ++i) {
            p[i] = (unsigned char)((add ? p[i] : 0) + (int)(mixed(h + i) & 0x3b));
        }
    }
}

// ------------------------------------------------------------------------------------------------
// who may see which memory in one call

typedef enum role {
    ROLE_IN,
    ROLE_OUT,
    ROLE_SAVED,
    ROLE_PARAM,
    ROLE_STATE,
    ROLE_WORKSPACE, // roles above: values; below: gradients
    ROLE_GRAD_OUT,
    ROLE_GRAD_IN,
    ROLE_GRAD_PARAM
} role;

typedef struct span {
    const char *begin, *end;
    role as;
    int index;
    uint32_t tensor; // 0: of none
    bool is_written;
} span;

typedef struct spans {
    const layer_info *layer;
    span all[SPANS];
    int count;
} spans;

static void add_span(spans *s, role as, int index, ms_tensor tensor, const ms_view *view,
                     bool is_written) {
    if (view->data == NULL) {
        return;
    }
    CHECK(s->count < SPANS && view_bytes(view) > 0);
    span *to = &s->all[s->count++];
    to->begin = (const char *)view->data;
    to->end = to->begin + view_bytes(view);
    to->as = as;
    to->index = index;
    to->tensor = tensor.id;
    to->is_written = is_written;
}

static bool is_value(role as) {
    return as <= ROLE_STATE;
}

/* Whether `result` may have taken over the memory of `operand`. */
static bool may_share(const ms_layer_desc *d, const span *result, const span *operand) {
    if (result->tensor == operand->tensor && is_value(result->as) == is_value(operand->as)) {
        return result->as != ROLE_WORKSPACE && operand->as != ROLE_WORKSPACE;
    }
    if (result->as == ROLE_OUT && operand->as == ROLE_IN) {
        for (int i = 0; i < MS_LIMIT_IN; ++i) {
            if ((d->in_place[result->index] >> i & 1) != 0 && d->in[i].id == operand->tensor) {
                return result->begin == operand->begin;
            }
        }
    }
    for (int i = 0; i < MS_LIMIT_IN && result->as == ROLE_GRAD_IN; ++i) {
        const ms_slot_masks *over = &d->grad_in_place[i];
        if (d->in[i].id != result->tensor) {
            continue;
        }
        for (int k = 0; k < 16; ++k) {
            const bool in = (over->in >> k & 1) != 0 && operand->as == ROLE_IN &&
                            d->in[k].id == operand->tensor;
            const bool other = operand->index == k &&
                               (((over->out >> k & 1) != 0 && operand->as == ROLE_OUT) ||
                                ((over->saved >> k & 1) != 0 && operand->as == ROLE_SAVED) ||
                                ((over->grad_out >> k & 1) != 0 && operand->as == ROLE_GRAD_OUT));
            if (in || other) {
                return result->begin == operand->begin;
            }
        }
    }
    return false;
}

static void check_spans(const spans *s) {
    const ms_layer_desc *d = &s->layer->desc;
    for (int i = 0; i < s->count; ++i) {
        for (int k = 0; k < i; ++k) {
            const span *a = &s->all[i], *b = &s->all[k];
            const bool apart = a->end <= b->begin || b->end <= a->begin;
            if (!apart && (a->is_written || b->is_written)) {
                CHECK(may_share(d, a, b) || may_share(d, b, a));
            }
        }
    }
}

/* Slots that are in use, as a mask. */
static uint32_t used(const ms_tensor *slots, int count) {
    uint32_t mask = 0;
    for (int i = 0; i < count; ++i) {
        mask |= (uint32_t)(slots[i].id != 0) << i;
    }
    return mask;
}

static void add_values(spans *s, role as, const ms_tensor *tensors, int limit, const ms_view *views,
                       uint32_t written) {
    const uint32_t mask = used(tensors, limit);
    for (int i = 0; i < limit && mask >> i != 0; ++i) {
        add_span(s, as, i, tensors[i], &views[i], (written >> i & 1) != 0);
    }
}

static void add_gradients(spans *s, role as, const ms_tensor *tensors, int limit,
                          const ms_view *views, bool written) {
    if (views != NULL) {
        add_values(s, as, tensors, limit, views, written ? MS_ALL_SLOTS : 0);
    }
}

static void list_spans(spans *s, const ms_call *call, const layer_info *layer) {
    const ms_layer_desc *d = &layer->desc;
    const bool back = call->phase == MS_PHASE_BACKWARD;
    const ms_tensor none = {0};
    ms_view work;
    s->layer = layer;
    s->count = 0;
    add_values(s, ROLE_IN, d->in, MS_LIMIT_IN, call->in, back ? d->clobbers.in : 0);
    add_values(s, ROLE_OUT, d->out, MS_LIMIT_OUT, call->out, back ? d->clobbers.out : MS_ALL_SLOTS);
    add_values(s, ROLE_SAVED, d->saved, MS_LIMIT_SAVED, call->saved,
               back ? d->clobbers.saved : MS_ALL_SLOTS);
    add_values(s, ROLE_PARAM, d->param, MS_LIMIT_PARAM, call->param, 0);
    add_values(s, ROLE_STATE, d->state, MS_LIMIT_STATE, call->state,
               back ? d->backward_state : MS_ALL_SLOTS);
    add_gradients(s, ROLE_GRAD_OUT, d->out, MS_LIMIT_OUT, call->grad_out, d->clobbers.grad_out);
    add_gradients(s, ROLE_GRAD_IN, d->in, MS_LIMIT_IN, call->grad_in, true);
    add_gradients(s, ROLE_GRAD_PARAM, d->param, MS_LIMIT_PARAM, call->grad_param, true);
    if (call->workspace != NULL && call->workspace_bytes > 0) {
        memset(&work, 0, sizeof work);
        work.data = call->workspace;
        work.dtype = MS_DTYPE_U8;
        work.shape = ms_shape1((int64_t)call->workspace_bytes);
        add_span(s, ROLE_WORKSPACE, 0, none, &work, true);
    }
}

// ------------------------------------------------------------------------------------------------
// callbacks

static uint64_t read_all(uint64_t h, const ms_tensor *tensors, int limit, const ms_view *views,
                         uint32_t counting) {
    const uint32_t mask = used(tensors, limit);
    uint64_t ignored = 0;
    for (int i = 0; i < limit && mask >> i != 0; ++i) {
        if ((mask >> i & 1) == 0 || views[i].data == NULL) {
            CHECK((mask >> i & 1) != 0 || views[i].data == NULL);
        } else if ((counting >> i & 1) != 0) {
            h = digest(h + (uint64_t)i, views[i].data, view_bytes(&views[i]));
        } else {
            ignored ^= digest(0, views[i].data, view_bytes(&views[i]));
        }
    }
    return ignored == 1 ? h + 1 : h; // so that it is read
}

static void write_all(uint64_t h, const ms_tensor *tensors, int limit, const ms_view *views) {
    const uint32_t mask = used(tensors, limit);
    for (int i = 0; i < limit && mask >> i != 0; ++i) {
        if (views[i].data != NULL) {
            put(views[i].data, views[i].dtype, view_bytes(&views[i]), h + 1000u * (uint64_t)i,
                false);
        }
    }
}

static void check_workspace(const ms_call *call, const ms_workspace *declared) {
    const unsigned char *bytes = (const unsigned char *)call->workspace;
    CHECK(call->workspace_bytes >= declared->bytes);
    CHECK(call->workspace_bytes == 0 || call->workspace != NULL);
    if (call->workspace_bytes == 0) {
        return;
    }
    CHECK(((uintptr_t)call->workspace & 63u) == 0);
    for (uint64_t i = 0; i < call->workspace_bytes; ++i) {
        CHECK(declared->contents != MS_CONTENTS_ZERO || bytes[i] == 0);
    }
    for (uint64_t i = 0; i < call->workspace_bytes / sizeof(float); ++i) {
        float x;
        memcpy(&x, bytes + i * sizeof x, sizeof x);
        CHECK(declared->contents != MS_CONTENTS_FINITE || (x - x == 0.0f));
    }
    memset(call->workspace, 0xff, (size_t)call->workspace_bytes);
}

static void check_call(const ms_call *call, layer_info *layer) {
    spans s;
    CHECK(call->model == layer->owner->model && call->phase < MS_PHASE_COUNT);
    CHECK(call->micro < call->micro_count);
    CHECK(call->last_micro == (call->micro + 1 == call->micro_count));
    CHECK(layer->desc.bind == NULL || layer->bound == call);
    layer->bound = NULL;
    list_spans(&s, call, layer);
    check_spans(&s);
}

static int write_file(void *user, const void *data, size_t bytes) {
    file_image *f = (file_image *)user;
    if (bytes > FILE_BYTES - f->bytes) {
        return 1;
    }
    memcpy(f->data + f->bytes, data, bytes);
    f->bytes += bytes;
    return 0;
}

static int read_file(void *user, uint64_t offset, void *data, size_t bytes) {
    const file_image *f = (const file_image *)user;
    CHECK(offset <= f->bytes && bytes <= f->bytes - offset);
    memcpy(data, f->data + offset, bytes);
    return 0;
}

static ms_sink plan_sink(world *w) {
    const ms_sink sink = {write_file, &w->plan};
    return sink;
}

static ms_source source_of(file_image *f) {
    const ms_source source = {read_file, f, f->bytes};
    return source;
}

/* What the plan stands on must not move under a running step. */
static void try_to_reenter(const ms_call *call, const slot *s) {
    ms_model *m = call->model;
    const ms_sink sink = plan_sink(s->world);
    const ms_source source = source_of(&s->world->plan);
    uint64_t bytes = 0;
    ms_memory_report report;
    CHECK(ms_wrap(m) == MS_RESULT_ORDER);
    CHECK(ms_detach(m) == MS_RESULT_ORDER);
    CHECK(ms_step(m, NULL) == MS_RESULT_ORDER);
    CHECK(ms_step_slice(m, 5, NULL) == MS_RESULT_ORDER);
    CHECK(ms_suspend(m, NULL) == MS_RESULT_ORDER);
    CHECK(ms_resume(m) == MS_RESULT_ORDER);
    CHECK(ms_forward(m, NULL) == MS_RESULT_ORDER);
    CHECK(ms_backward(m) == MS_RESULT_ORDER);
    CHECK(ms_update(m) == MS_RESULT_ORDER);
    CHECK(ms_eval(m, NULL) == MS_RESULT_ORDER);
    CHECK(ms_smallest_budget(m, &bytes) == MS_RESULT_ORDER);
    CHECK(ms_set_gradient_factor(m, 2.0f) == MS_RESULT_ORDER);
    CHECK(ms_set_paused(m, s->tensors[0], true) != MS_RESULT_OK);
    CHECK(ms_plan_save(m, &sink) == MS_RESULT_ORDER);
    CHECK(ms_plan_load(m, &source) == MS_RESULT_ORDER);
    CHECK(ms_reshape(m, s->largest) != MS_RESULT_OK);
    CHECK(s->loan_count == 0 ||
          ms_borrow(m, s->loans[0].tensor, s->loans[0].memory) != MS_RESULT_OK);
    CHECK(ms_report(m, &report) == MS_RESULT_OK);
}

static int multiply(const ms_call *call) {
    float a[4] = {1.0f, 2.0f, 3.0f, 4.0f}, c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    ms_matrix m, result;
    memset(&m, 0, sizeof m);
    m.data = a;
    m.rows = m.cols = m.stride = 2;
    m.dtype = MS_DTYPE_F32;
    result = m;
    result.data = c;
    if (ms_gemm(call, 1.0f, m, ms_transpose(m), 0.0f, result) != MS_RESULT_OK) {
        return CALLBACK_ERROR;
    }
    CHECK(c[0] == 5.0f && c[1] == 11.0f && c[2] == 11.0f && c[3] == 25.0f);
    return 0;
}

static int enter(const ms_call *call, layer_info *layer) {
    world *w = layer->owner->world;
    check_call(call, layer);
    if (w->reenters) {
        try_to_reenter(call, layer->owner);
    }
    if (counts_down(w, &w->callback_fails_in)) {
        return CALLBACK_ERROR;
    }
    return multiply(call);
}

static int fz_bind(const ms_call *call) {
    layer_info *layer = (layer_info *)call->user;
    world *w = layer->owner->world;
    layer->bound = call;
    return counts_down(w, &w->callback_fails_in) ? CALLBACK_ERROR : 0;
}

/* What the values of a layer depend on: all that it reads, but no more than recompute sees. */
static uint64_t digest_forward(const ms_call *call, const layer_info *layer) {
    const ms_layer_desc *d = &layer->desc;
    const ms_reads *r = &d->recompute_reads;
    const bool all =
        d->recompute == NULL || ((r->in | r->out | r->saved | r->param) == 0 && !r->nothing);
    uint64_t h = call->seed + 1;
    h = read_all(h, d->in, MS_LIMIT_IN, call->in, all ? MS_ALL_SLOTS : r->in);
    h = read_all(h, d->param, MS_LIMIT_PARAM, call->param, all ? MS_ALL_SLOTS : r->param);
    return read_all(h, d->state, MS_LIMIT_STATE, call->state,
                    d->recompute_keeps_state ? 0 : MS_ALL_SLOTS);
}

static void contribute(const ms_layer_desc *d, const ms_call *call, uint64_t h) {
    const uint32_t ins = used(d->in, MS_LIMIT_IN);
    for (int i = 0; i < MS_LIMIT_IN && ins >> i != 0; ++i) {
        const ms_view *g = &call->grad_in[i];
        const bool must = (d->must_grad_in_place >> i & 1) != 0;
        if (g->data == NULL) {
            continue;
        }
        CHECK(g->beta == 0.0f || g->beta == 1.0f);
        CHECK((d->overwrites.in >> i & 1) == 0 || g->beta == 0.0f);
        CHECK((d->accumulates.in >> i & 1) == 0 || g->beta == 1.0f);
        for (int k = 0; k < MS_LIMIT_OUT && must; ++k) {
            const bool named = (d->grad_in_place[i].grad_out >> k & 1) != 0;
            CHECK(!named || call->grad_out[k].data == NULL || call->grad_out[k].data == g->data);
        }
        put(g->data, g->dtype, view_bytes(g), h + 50u * (uint64_t)i, !must && g->beta != 0.0f);
    }
}

static void contribute_params(const ms_layer_desc *d, const ms_call *call, uint64_t h) {
    const uint32_t params = used(d->param, MS_LIMIT_PARAM);
    for (int i = 0; i < MS_LIMIT_PARAM && params >> i != 0; ++i) {
        const ms_view *g = &call->grad_param[i];
        if (g->data != NULL) {
            CHECK(g->beta == 0.0f || g->beta == 1.0f);
            CHECK((d->overwrites.param >> i & 1) == 0 || g->beta == 0.0f);
            CHECK((d->accumulates.param >> i & 1) == 0 || g->beta == 1.0f);
            put(g->data, g->dtype, view_bytes(g), h + 70u * (uint64_t)i, g->beta != 0.0f);
        }
    }
}

static void check_operands(const ms_call *call, const ms_layer_desc *d) {
    const uint32_t ins = used(d->in, MS_LIMIT_IN), outs = used(d->out, MS_LIMIT_OUT);
    for (int i = 0; i < MS_LIMIT_IN && ins >> i != 0; ++i) {
        CHECK((ins >> i & 1) == 0 || call->phase == MS_PHASE_RECOMPUTE || call->in[i].data != NULL);
    }
    for (int j = 0; j < MS_LIMIT_OUT && outs >> j != 0; ++j) {
        const bool wanted = (call->wanted_out >> j & 1) != 0;
        CHECK(wanted == (call->out[j].data != NULL));
        for (int i = 0; i < MS_LIMIT_IN && wanted && (d->must_in_place >> j & 1) != 0; ++i) {
            CHECK((d->in_place[j] >> i & 1) == 0 || call->in[i].data == call->out[j].data);
        }
    }
}

/* Forward, or what a recompute callback does. */
static int fz_make(const ms_call *call, bool own) {
    layer_info *layer = (layer_info *)call->user;
    const ms_layer_desc *d = &layer->desc;
    const bool again = call->phase == MS_PHASE_RECOMPUTE;
    const int error = enter(call, layer);
    if (error != 0) {
        return error;
    }
    CHECK(call->phase != MS_PHASE_BACKWARD);
    CHECK(!again || ((own || !d->no_recompute) && d->grads_in_forward == 0));
    check_operands(call, d);
    check_workspace(call, own ? &d->recompute_workspace : &d->forward_workspace);
    const uint64_t h = digest_forward(call, layer);
    trace("      layer %u, phase %d, seed %llx: %llx", (unsigned)(layer - layer->owner->layers),
          (int)call->phase, (unsigned long long)call->seed, (unsigned long long)h);
    write_all(h, d->out, MS_LIMIT_OUT, call->out);
    write_all(h + 77, d->saved, MS_LIMIT_SAVED, call->saved);
    if (!again || !d->recompute_keeps_state) {
        write_all(h + 99, d->state, MS_LIMIT_STATE, call->state);
    }
    if (call->phase == MS_PHASE_FORWARD && d->grads_in_forward != 0) {
        contribute(d, call, h);
    }
    return 0;
}

static int fz_forward(const ms_call *call) {
    return fz_make(call, false);
}

static int fz_recompute(const ms_call *call) {
    return fz_make(call, true);
}

static void destroy_operands(const ms_call *call, const layer_info *layer) {
    spans s;
    list_spans(&s, call, layer);
    for (int i = 0; i < s.count; ++i) {
        bool is_result = false;
        for (int k = 0; k < s.count; ++k) {
            is_result =
                is_result || (s.all[k].as > ROLE_GRAD_OUT && s.all[k].begin < s.all[i].end &&
                              s.all[i].begin < s.all[k].end);
        }
        if (s.all[i].is_written && !is_result && s.all[i].as != ROLE_WORKSPACE) {
            memset((void *)(uintptr_t)s.all[i].begin, 0xff,
                   (size_t)(s.all[i].end - s.all[i].begin));
        }
    }
}

static int fz_backward(const ms_call *call) {
    layer_info *layer = (layer_info *)call->user;
    const ms_layer_desc *d = &layer->desc;
    const ms_reads *r = &d->backward_reads;
    const bool all = (r->in | r->out | r->saved | r->param) == 0 && !r->nothing;
    const int error = enter(call, layer);
    uint64_t h = call->seed + 2;
    if (error != 0) {
        return error;
    }
    CHECK(call->phase == MS_PHASE_BACKWARD && d->grads_in_forward == 0);
    check_workspace(call, &d->backward_workspace);
    h = read_all(h, d->in, MS_LIMIT_IN, call->in, all ? MS_ALL_SLOTS : r->in);
    h = read_all(h, d->out, MS_LIMIT_OUT, call->out, all ? MS_ALL_SLOTS : r->out);
    h = read_all(h, d->saved, MS_LIMIT_SAVED, call->saved, all ? MS_ALL_SLOTS : r->saved);
    h = read_all(h, d->param, MS_LIMIT_PARAM, call->param, all ? MS_ALL_SLOTS : r->param);
    h = read_all(h, d->out, MS_LIMIT_OUT, call->grad_out, MS_ALL_SLOTS);
    trace("      layer %u, backward, seed %llx: %llx", (unsigned)(layer - layer->owner->layers),
          (unsigned long long)call->seed, (unsigned long long)h);
    contribute(d, call, h);
    contribute_params(d, call, h);
    destroy_operands(call, layer);
    return 0;
}

/* Bytes that state of so many elements takes. */
static size_t state_bytes(ms_state_format format, uint64_t count) {
    const uint64_t whole = count / 4096, rest = count % 4096;
    return (size_t)(format == MS_STATE_FORMAT_F32 ? 4 * count
                    : format == MS_STATE_FORMAT_BF16
                        ? 2 * count
                        : whole * (4096 + 16 * 4) + (rest + 63) / 64 * 64 + (rest + 255) / 256 * 4);
}

static uint64_t fz_update_bytes(const ms_shape *shape, void *user) {
    const update_info *u = (const update_info *)user;
    return u->bytes > 64 ? u->bytes : u->bytes * ms_shape_count(shape);
}

static void check_update(const ms_update_args *args, const update_info *u) {
    const ms_call *call = args->call;
    const uint64_t bytes = fz_update_bytes(&args->shape, args->user);
    CHECK(args->kind == MS_OPTIMIZER_CUSTOM && args->begin == 0 && call != NULL);
    CHECK(call->model == u->owner->model && ms_shape_count(&args->shape) == args->count);
    CHECK(call->workspace_bytes >= bytes && (bytes == 0 || call->workspace != NULL));
    if (bytes > 0) {
        memset(call->workspace, 0xff, (size_t)bytes);
    }
    CHECK(multiply(call) == 0 || u->owner->world->faults > 0);
}

static int fz_custom(const ms_update_args *args) {
    const update_info *u = (const update_info *)args->user;
    world *w = u->owner->world;
    const float scale = args->gradient_scale != NULL ? *args->gradient_scale : 1.0f;
    check_update(args, u);
    if (counts_down(w, &w->callback_fails_in)) {
        return CALLBACK_ERROR;
    }
    for (int k = 0; k < MS_LIMIT_OPTIMIZER_STATE && args->state[k] != NULL; ++k) {
        if (args->state_format[k] != MS_STATE_FORMAT_F32) {
            memset(args->state[k], 0, state_bytes(args->state_format[k], args->count));
        }
    }
    for (uint64_t i = 0; i < args->count; ++i) {
        const float g = scale * element(args->gradient, args->gradient_dtype, i);
        for (int k = 0; k < MS_LIMIT_OPTIMIZER_STATE && args->state[k] != NULL; ++k) {
            if (args->state_format[k] == MS_STATE_FORMAT_F32) {
                args->state[k][i] = 0.5f * args->state[k][i] + g;
            }
        }
        if (args->master != NULL) {
            args->master[i] -= 0.01f * g;
        }
        set_element(args->value, args->value_dtype, i,
                    args->master != NULL                ? args->master[i]
                    : args->value_dtype == MS_DTYPE_F32 ? args->value[i] - 0.01f * g
                                                        : g);
    }
    return 0;
}

// ------------------------------------------------------------------------------------------------
// results

/* Every error has its text, and a layer that keeps to its contract is never accused. */
static ms_result told(const slot *s, ms_result result) {
    const bool is_error = result != MS_RESULT_OK && result != MS_RESULT_MORE;
    trace("    %s%s%s", ms_result_name(result), is_error ? ": " : "",
          is_error ? ms_last_error(s->model) : "");
    CHECK((int)result >= 0 && result < MS_RESULT_COUNT && result != MS_RESULT_CONTRACT);
    CHECK(!is_error || ms_last_error(s->model)[0] != 0);
    return result;
}

/* The same for functions that take a const model and leave no text. */
static ms_result told_nothing(ms_result result) {
    CHECK((int)result >= 0 && result < MS_RESULT_COUNT && result != MS_RESULT_CONTRACT);
    return result;
}

/* What is applied costs or saves something, what is not does neither. */
static void check_decision(const ms_decision *d, void *user) {
    uint32_t *count = (uint32_t *)user;
    CHECK(d->layer_index == *count / MS_TECHNIQUE_COUNT &&
          (uint32_t)d->technique == *count % MS_TECHNIQUE_COUNT && d->rule != NULL);
    CHECK(d->is_applied == (d->saved_bytes > 0 || d->added_us > 0.0));
    *count += 1;
}

/* What a step may say where nothing has failed. */
static void check_step(const slot *s, ms_result result, bool is_clean) {
    told(s, result);
    CHECK(!is_clean || result == MS_RESULT_OK || result == MS_RESULT_ORDER ||
          result == MS_RESULT_NONFINITE || result == MS_RESULT_FAILED ||
          result == MS_RESULT_CANCELLED || result == MS_RESULT_DRY_RUN || s->model == NULL);
    CHECK(result != MS_RESULT_DRY_RUN || s->config.dry_run);
}

static void check_report(const slot *s, bool has_budget) {
    ms_memory_report r;
    uint64_t sum = 0;
    memset(&r, 0, sizeof r);
    if (told_nothing(ms_report(s->model, &r)) != MS_RESULT_OK) {
        CHECK(!s->has_plan);
        return;
    }
    for (int i = 0; i < MS_CATEGORY_COUNT; ++i) {
        sum += r.peak_bytes[i];
    }
    CHECK(sum == r.lower_bound_bytes && r.arena_bytes == r.lower_bound_bytes + r.gap_bytes);
    CHECK(r.peak_layer != NULL && r.layer_count <= LAYERS);
    CHECK(r.layout_freed_bytes + (int64_t)r.gap_bytes >= 0); // the gap of the plain plan
    CHECK(!has_budget || s->config.force_optimize || r.arena_bytes <= r.budget_bytes);
}

static void show_text(const char *text, size_t length, void *user) {
    (void)user;
    printf("%.*s", (int)length, text);
}

static void show_plan(const slot *s) {
    if (is_traced) {
        told_nothing(ms_print_plan_full(s->model, show_text, NULL));
        told_nothing(ms_print_program(s->model, MS_PROGRAM_TRAIN, show_text, NULL));
    }
}

static void digest_text(const char *text, size_t length, void *user) {
    uint64_t *h = (uint64_t *)user;
    CHECK(text != NULL);
    *h = digest(*h, text, length);
}

/* 0 if memory for the listings was refused. */
static uint64_t plan_digest(const slot *s) {
    const uint64_t faults = s->world->faults;
    uint64_t h = 0;
    ms_memory_report r;
    memset(&r, 0, sizeof r);
    CHECK(ms_report(s->model, &r) == MS_RESULT_OK);
    const ms_program programs[] = {MS_PROGRAM_TRAIN, MS_PROGRAM_EVAL};
    for (int i = 0; i < 2; ++i) {
        const ms_result result = ms_print_program(s->model, programs[i], digest_text, &h);
        CHECK(result == MS_RESULT_OK ||
              (result == MS_RESULT_OUT_OF_MEMORY && faults != s->world->faults));
    }
    return faults == s->world->faults ? digest(h, &r.arena_bytes, sizeof r.arena_bytes) : 0;
}

// ------------------------------------------------------------------------------------------------
// operations: creation

static void op_destroy(world *w, slot *s) {
    ms_destroy(s->model);
    for (uint32_t i = 0; i < s->loan_count; ++i) {
        free(s->loans[i].memory);
    }
    free(s->image);
    memset(s, 0, sizeof *s);
    s->world = w;
}

static uint64_t a_budget(world *w) {
    switch (below(w, 5)) {
    case 0:
        return (uint64_t)1 << 40;
    case 1:
        return 0;
    case 2:
        return 1 + (uint64_t)take(w);
    case 3:
        return 64 * (uint64_t)take(w);
    default:
        return 512 * (uint64_t)take(w);
    }
}

static ms_switch a_switch(world *w) {
    const uint32_t x = below(w, 64);
    return (ms_switch)(x == 63 ? 3 : x % 3);
}

static void spoil_config(world *w, ms_config *config) {
    switch (below(w, 6)) {
    case 0:
        config->allocator.release = NULL;
        break;
    case 1:
        config->backend.size = 4;
        break;
    case 2:
        config->backend.update = NULL;
        break;
    case 3:
        config->target_utilization = one_in(w, 2) ? (double)NAN : 2.0;
        break;
    case 4:
        config->backend.memory_alloc = NULL;
        break;
    default:
        memset(&config->backend, 0, sizeof config->backend);
        break;
    }
}

static uint32_t choose_strategy(const ms_policy_args *args) {
    CHECK(args->strategy_count == MS_MODE_COUNT && args->hardware != NULL);
    for (uint32_t i = 0; i < args->strategy_count; ++i) {
        const ms_strategy *s = &args->strategies[i];
        CHECK(s->fits == (s->arena_bytes <= args->budget_bytes));
        CHECK(s->mode < MS_MODE_COUNT && s->step_us >= 0.0);
    }
    return *(const uint8_t *)args->user % (MS_MODE_COUNT + 1);
}

static void op_create(world *w, slot *s) {
    const uint32_t bits = take(w);
    op_destroy(w, s);
    s->config.allocator = world_allocator(w);
    s->config.backend = world_backend(w);
    s->config.log = (bits & 1) != 0 ? hear : NULL;
    s->config.log_user = w;
    s->config.force_optimize = (bits & 6) == 6;
    s->config.dry_run = (bits & 24) == 24;
    s->config.debug = (bits & 96) == 96;
    s->config.arena = (bits & 128) != 0 ? w->arena : NULL;
    s->config.memory_budget_bytes = a_budget(w);
    s->config.checkpointing = a_switch(w);
    s->config.early_update = a_switch(w);
    s->config.accumulation_steps = below(w, 4);
    s->config.seed = s->answer = take(w);
    s->config.mode = (ms_mode)(s->answer % MS_MODE_COUNT);
    s->config.auto_policy = (s->answer & 12) == 12;
    s->config.policy = (s->answer & 16) != 0 ? choose_strategy : NULL;
    s->config.policy_user = &s->answer;
    s->config.empirical_profiling = (s->answer & 96) == 96 ? MS_SWITCH_ON : MS_SWITCH_DEFAULT;
    s->config.warmup_steps = s->answer & 1;
    s->config.max_instruction_us = (s->answer & 128) != 0 ? 0.001 : 0.0;
    s->config.mixed_precision = a_switch(w);
    s->config.mixed_dtype = below(w, 2) == 0 ? MS_DTYPE_BF16 : MS_DTYPE_F16;
    s->config.master_weights = a_switch(w);
    s->config.optimizer_8bit = a_switch(w);
    s->config.offloading = a_switch(w);
    s->config.tiling = a_switch(w);
    s->config.clock = world_clock;
    s->config.clock_user = w;
    s->shape = ms_shape2(1 + (int64_t)below(w, 5), 1 + (int64_t)below(w, 24));
    if (one_in(w, 16)) {
        spoil_config(w, &s->config);
    }
    const ms_result result = ms_create(&s->config, &s->model);
    if (result != MS_RESULT_OK && s->model != NULL) {
        CHECK(ms_last_error(s->model)[0] != 0 && ms_wrap(s->model) == result);
        ms_destroy(s->model);
        s->model = NULL;
    }
    CHECK((result == MS_RESULT_OK) == (s->model != NULL));
}

static void op_arena(world *w, slot *s) {
    const ms_backend backend = world_backend(w);
    const ms_allocator allocator = world_allocator(w);
    (void)s;
    if (w->arena != NULL) {
        CHECK(ms_arena_bytes(w->arena) <= w->live_bytes);
        ms_arena_destroy(w->arena);
        w->arena = NULL;
        return;
    }
    const ms_result result = ms_arena_create(&backend, &allocator, &w->arena);
    CHECK((result == MS_RESULT_OK) == (w->arena != NULL));
}

static void op_other_model(world *w, slot *s) {
    (void)s;
    w->current = (w->current + 1) % MODELS;
}

static void op_fail_soon(world *w, slot *s) {
    const uint32_t kind = below(w, 4);
    (void)s;
    w->allocation_fails_in = kind == 0 ? 1 + (uint64_t)take(w) : 0;
    w->backend_fails_in = kind == 1 ? 1 + (uint64_t)take(w) : 0;
    w->callback_fails_in = kind == 2 ? 1 + (uint64_t)take(w) : 0;
    w->reenters = kind == 3 && one_in(w, 2);
}

// ------------------------------------------------------------------------------------------------
// operations: registration

static ms_tensor a_tensor(world *w, const slot *s) {
    const uint8_t x = take(w);
    const slot *from = x >= 250 ? &w->slots[(w->current + 1) % MODELS] : s;
    ms_tensor t = {0};
    if (x >= 240 && x < 250) {
        t.id = take(w);
        t.id |= (uint32_t)take(w) << 24;
    } else if (from->tensor_count > 0) {
        t = from->tensors[x % from->tensor_count];
    }
    return t;
}

/* A layer, of another model at times, or a wrong handle. */
static ms_layer a_layer(world *w, const slot *s) {
    const uint32_t x = below(w, LAYERS + 4);
    const slot *from = x >= LAYERS + 2 ? &w->slots[(w->current + 1) % MODELS] : s;
    const ms_layer layer = {x};
    return x % LAYERS < from->layer_count ? from->layers[x % LAYERS].handle : layer;
}

/* The n-th tensor of a kind, or any where there is none. */
static ms_tensor a_tensor_of(world *w, const slot *s, tensor_kind kind) {
    const uint32_t nth = below(w, 8);
    ms_tensor last = {0};
    for (uint32_t i = 0, seen = 0; i < s->tensor_count && seen <= nth; ++i) {
        if (s->kinds[i] == kind) {
            last = s->tensors[i];
            seen += 1;
        }
    }
    return last.id != 0 ? last : a_tensor(w, s);
}

static ms_shape a_shape(world *w, const slot *s) {
    const uint32_t x = take(w);
    ms_shape shape = s->shape;
    if ((x & 15) == 15) { // nonsense
        shape.rank = (int32_t)below(w, 10) - 1;
        shape.dim[below(w, MS_LIMIT_RANK)] = one_in(w, 2) ? -3 : (int64_t)1 << below(w, 62);
        return shape;
    }
    if ((x & 3) == 1) {
        shape = ms_shape1(1 + (int64_t)below(w, 40));
    } else if ((x & 3) == 2) {
        shape =
            ms_shape3(1 + (int64_t)below(w, 4), 1 + (int64_t)below(w, 4), 1 + (int64_t)below(w, 4));
    } else if ((x & 7) == 7) {
        memset(&shape, 0, sizeof shape);
    }
    if ((x & 0x30) == 0x30 && s->axis_count > 0) {
        shape = ms_along(shape, (int)below(w, 3), s->axes[below(w, s->axis_count)]);
    }
    return shape;
}

static ms_tensor add_tensor(slot *s, tensor_kind kind, ms_dtype dtype, ms_shape shape) {
    ms_tensor t = {0};
    if (s->tensor_count == TENSORS) {
        return t;
    }
    switch (kind) {
    case KIND_INPUT:
        t = ms_input(s->model, "input", dtype, shape);
        break;
    case KIND_PARAM:
        t = ms_param(s->model, "param", dtype, shape);
        break;
    case KIND_BUFFER:
        t = ms_buffer(s->model, NULL, dtype, shape);
        break;
    case KIND_ACTIVATION:
        t = ms_activation(s->model, "activation %d", dtype, shape);
        break;
    default:
        t = ms_saved(s->model, "", dtype, shape);
        break;
    }
    if (t.id == 0) {
        CHECK(ms_last_error(s->model)[0] != 0);
        s->has_refused = s->has_refused || !s->has_plan;
    } else {
        CHECK(!s->has_plan);
        s->kinds[s->tensor_count] = kind;
        s->tensors[s->tensor_count++] = t;
    }
    return t;
}

static void op_tensor(world *w, slot *s) {
    const uint32_t x = take(w);
    const ms_dtype dtype = (x & 0xe0) == 0xe0 ? (ms_dtype)below(w, 12) : MS_DTYPE_F32;
    const ms_tensor t = add_tensor(s, (tensor_kind)(x % KIND_COUNT), dtype, a_shape(w, s));
    if (dtype != MS_DTYPE_F32 && t.id != 0 && s->kinds[s->tensor_count - 1] == KIND_PARAM) {
        ms_set_frozen(s->model, t, one_in(w, 4) ? false : true);
        s->may_refuse = true;
    }
}

static void op_axis(world *w, slot *s) {
    const int64_t size = 1 + (int64_t)below(w, 4);
    int64_t largest = one_in(w, 8) ? 0 : size + (int64_t)below(w, 4);
    const ms_axis axis = ms_add_axis(s->model, "axis", size, largest);
    if (axis.id == 0) {
        s->has_refused = s->has_refused || !s->has_plan;
        return;
    }
    if (one_in(w, 3)) {
        const int64_t more = largest + (int64_t)below(w, 5) - 1;
        ms_set_eval_largest(s->model, axis, more);
        s->may_refuse |= more < largest;
        largest = more > largest ? more : largest;
    }
    CHECK(s->axis_count < MS_LIMIT_AXES);
    s->axes[s->axis_count] = axis;
    s->largest[s->axis_count++] = largest;
    if (s->axis_count == 1 && s->value_count == 0) { // all values lie along the first axis
        s->shape = ms_along(ms_shape2(2 * size, s->shape.dim[1]), 0, axis);
    }
}

static void register_layer(slot *s, layer_info *layer, bool is_good) {
    layer->owner = s;
    layer->desc.user = layer;
    layer->handle = ms_register_layer(s->model, &layer->desc);
    if (layer->handle.id == 0) {
        CHECK(s->model == NULL || ms_last_error(s->model)[0] != 0);
        if (is_good && !s->has_refused && !s->may_refuse && s->world->faults == 0) {
            broken(ms_last_error(s->model), __FILE__, __LINE__);
        }
        s->has_refused = s->has_refused || !s->has_plan;
        return;
    }
    s->layer_count += 1;
}

static ms_tensor a_value(world *w, slot *s) {
    ms_tensor t = {0};
    if (s->value_count == 0) {
        t = add_tensor(s, KIND_INPUT, MS_DTYPE_F32, s->shape);
        s->values[0] = t;
        s->value_count = t.id != 0 ? 1 : 0;
    }
    return s->value_count > 0 ? s->values[below(w, s->value_count)] : t;
}

/* How backward treats memory. The masks fit a layer of these inputs and one output. */
static void add_edges(world *w, ms_layer_desc *d, int ins) {
    const uint32_t bits = take(w), more = take(w);
    const uint32_t all = (1u << ins) - 1u;
    d->accumulates.in = (bits & 3) == 1 ? all : 0;
    d->overwrites.in = (bits & 3) == 2 ? all : (bits & 3) == 3 ? 1 : 0;
    d->in_place[0] = (bits & 4) != 0 ? 1 : 0;
    d->must_in_place = (bits & 12) == 12 && d->recompute == NULL ? 1 : 0;
    if ((bits & 16) != 0 && d->accumulates.in == 0) {
        d->grad_in_place[0].grad_out = 1;
        d->must_grad_in_place = (bits & 32) != 0 && d->overwrites.in == 0 ? 1 : 0;
    }
    d->clobbers.in = (bits & 64) != 0 ? 1 : 0;
    d->clobbers.grad_out = (bits & 128) != 0 && d->must_grad_in_place == 0 ? 1 : 0;
    if (d->param[0].id != 0) {
        d->accumulates.param = (more & 3) == 1 ? 1 : 0;
        d->overwrites.param = (more & 3) == 2 ? 1 : 0;
    }
    if ((more & 12) == 4) {
        d->backward_reads.in = 1;
        d->backward_reads.out = d->clobbers.out != 0 || (more & 16) != 0 ? 1 : 0;
    } else if ((more & 12) == 8 && d->clobbers.in == 0) {
        d->backward_reads.nothing = true;
    } else if ((more & 12) == 12 && d->saved[0].id != 0 && d->clobbers.in == 0) {
        d->backward_reads.saved = 1;
    }
}

/* A vector or a matrix; or frozen, of any dtype. */
static ms_tensor a_new_param(world *w, slot *s) {
    const uint32_t x = take(w), rows = 1 + below(w, 70);
    const bool is_frozen = (x & 7) == 7;
    const ms_tensor t = add_tensor(
        s, KIND_PARAM, is_frozen ? (ms_dtype)(x >> 3 & 7) : MS_DTYPE_F32,
        (x & 64) != 0 ? ms_shape2((int64_t)rows % 9 + 1, 1 + (int64_t)(x & 15)) : ms_shape1(rows));
    if (is_frozen && t.id != 0) {
        ms_set_frozen(s->model, t, true);
    }
    return t;
}

/* Which operands may be in 16 bits; what is computed in place has the dtype of what it lies in. */
static ms_layer_dtypes some_dtypes(world *w, const ms_layer_desc *d) {
    const uint32_t x = take(w);
    const bool in_place = (d->must_in_place | d->must_grad_in_place) != 0;
    ms_layer_dtypes t;
    memset(&t, 0, sizeof t);
    t.accepts = ((x & 1) != 0 ? 1u << MS_DTYPE_BF16 : 0) | ((x & 2) != 0 ? 1u << MS_DTYPE_F16 : 0);
    t.f32_in = !in_place && (x & 4) != 0 ? 1 : 0;
    t.f32_out = !in_place && (x & 8) != 0 ? 1 : 0;
    t.half_gradients = (x & 16) != 0 && d->param[0].id != 0 ? 1 : 0;
    return t;
}

/* A layer that must be accepted: one or two inputs of the model's shape, one output of it. */
static void make_layer(world *w, slot *s, ms_tensor made) {
    const uint32_t bits = take(w), more = take(w);
    if (s->layer_count == LAYERS || s->value_count == VALUES || s->has_plan) {
        return;
    }
    layer_info *layer = &s->layers[s->layer_count];
    ms_layer_desc *d = &layer->desc;
    memset(layer, 0, sizeof *layer);
    d->in[0] = a_value(w, s);
    d->in[1].id = (bits & 1) != 0 ? a_value(w, s).id : 0;
    if ((bits & 2) != 0) {
        const bool is_new = (bits & 4) != 0;
        d->param[0] = is_new ? a_new_param(w, s) : a_tensor_of(w, s, KIND_PARAM);
    }
    if ((bits & 24) == 24) {
        d->saved[0] = add_tensor(s, KIND_SAVED, MS_DTYPE_F32, s->shape);
        d->optional_saved = (more & 1) != 0 ? 1 : 0;
    }
    if ((bits & 96) == 96) {
        d->state[0] = add_tensor(s, KIND_BUFFER, MS_DTYPE_F32, ms_shape1(3));
        d->recompute_keeps_state = (more & 2) != 0;
    }
    d->out[0] = made.id != 0 ? made : add_tensor(s, KIND_ACTIVATION, MS_DTYPE_F32, s->shape);
    d->forward = fz_forward;
    d->backward = (more & 4) != 0 && (bits & 128) != 0 ? NULL : fz_backward;
    d->recompute = (more & 24) == 24 ? fz_recompute : NULL;
    d->bind = (more & 32) != 0 ? fz_bind : NULL;
    d->no_recompute = (more & 192) == 192 && d->recompute == NULL;
    if (d->backward != NULL && (more & 192) == 64) {
        add_edges(w, d, (bits & 1) != 0 ? 2 : 1);
    }
    if ((more & 192) == 128) {
        d->forward_workspace.bytes = take(w);
        d->forward_workspace.contents = (ms_contents)below(w, 3);
        d->backward_workspace = d->forward_workspace;
        d->backward_workspace.row_bytes = below(w, 9);
        d->recompute_workspace.bytes = d->recompute != NULL ? below(w, 100) : 0;
    }
    d->dtypes = some_dtypes(w, d);
    const bool is_picked = (bits & 6) == 2; // a param that was picked may be anything
    register_layer(s, layer, !is_picked && d->in[0].id != 0 && d->out[0].id != 0);
    if (layer->handle.id != 0) {
        s->values[s->value_count++] = d->out[0];
    }
}

static void op_good_layer(world *w, slot *s) {
    const ms_tensor none = {0};
    make_layer(w, s, none);
}

static void op_several_layers(world *w, slot *s) {
    for (uint32_t n = 1 + below(w, 6); n > 0; --n) {
        op_good_layer(w, s);
    }
}

/* The layer that ends in the loss. It may write its gradient in forward. */
static void op_loss(world *w, slot *s) {
    s->may_refuse = true;
    const uint32_t bits = take(w);
    if (s->layer_count == LAYERS || s->value_count == 0 || s->has_plan) {
        return;
    }
    layer_info *layer = &s->layers[s->layer_count];
    ms_layer_desc *d = &layer->desc;
    ms_shape rows = s->shape;
    memset(layer, 0, sizeof *layer);
    rows.rank = 1;
    rows.dim[1] = 0;
    rows.axes[1] = 0;
    d->in[0] = s->values[s->value_count - 1];
    d->out[0] = add_tensor(s, KIND_ACTIVATION, MS_DTYPE_F32, rows);
    d->forward = fz_forward;
    d->grads_in_forward = (bits & 3) == 3 ? 1 : 0;
    d->backward = d->grads_in_forward != 0 ? NULL : fz_backward;
    register_layer(s, layer, false);
    ms_set_loss(s->model, d->out[0]);
}

static uint32_t a_mask(world *w) {
    const uint8_t x = take(w);
    return x == 255 ? MS_ALL_SLOTS : (x & 0x80) != 0 ? (uint32_t)x << 8 | take(w) : x & 7u;
}

static ms_slot_masks some_overwrites(world *w) {
    ms_slot_masks o;
    o.in = a_mask(w);
    o.out = a_mask(w);
    o.saved = a_mask(w);
    o.grad_out = a_mask(w);
    return o;
}

static ms_reads some_reads(world *w) {
    ms_reads r;
    r.in = a_mask(w);
    r.out = a_mask(w);
    r.saved = a_mask(w);
    r.param = a_mask(w);
    r.nothing = one_in(w, 4);
    return r;
}

static ms_workspace a_workspace(world *w) {
    ms_workspace space;
    space.bytes = one_in(w, 32) ? UINT64_MAX - 3 : take(w);
    space.row_bytes = one_in(w, 32) ? (uint64_t)1 << 60 : below(w, 16);
    space.contents = (ms_contents)below(w, 4);
    return space;
}

/* Anything. */
static void fill_desc(world *w, slot *s, ms_layer_desc *d) {
    const uint32_t bits = take(w), more = take(w);
    for (uint32_t n = below(w, 4); n > 0; --n) {
        d->in[below(w, MS_LIMIT_IN)] = one_in(w, 2) ? a_tensor(w, s) : a_value(w, s);
    }
    for (uint32_t n = below(w, 3); n > 0; --n) {
        d->out[below(w, MS_LIMIT_OUT)] = a_tensor_of(w, s, KIND_ACTIVATION);
        d->saved[below(w, MS_LIMIT_SAVED)] = a_tensor_of(w, s, KIND_SAVED);
        d->param[below(w, MS_LIMIT_PARAM)] = a_tensor_of(w, s, KIND_PARAM);
        d->state[below(w, MS_LIMIT_STATE)] = a_tensor_of(w, s, KIND_BUFFER);
    }
    d->out[0] = add_tensor(s, KIND_ACTIVATION, MS_DTYPE_F32, a_shape(w, s));
    d->name = (bits & 1) != 0 ? "100% wild" : NULL;
    d->forward = (bits & 2) != 0 && s->config.dry_run ? NULL : fz_forward;
    d->backward = (bits & 4) != 0 ? NULL : fz_backward;
    d->recompute = (bits & 8) != 0 ? fz_recompute : NULL;
    d->bind = (bits & 16) != 0 ? fz_bind : NULL;
    d->backward_reads = some_reads(w);
    if ((bits & 32) != 0) {
        d->recompute_reads = some_reads(w);
    }
    if ((bits & 64) != 0) {
        d->accumulates.in = a_mask(w);
        d->accumulates.param = a_mask(w);
        d->overwrites.in = a_mask(w);
        d->overwrites.param = a_mask(w);
    }
    if ((bits & 128) != 0) {
        d->in_place[below(w, MS_LIMIT_OUT)] = a_mask(w);
        d->grad_in_place[below(w, MS_LIMIT_IN)] = some_overwrites(w);
        d->must_in_place = a_mask(w);
        d->must_grad_in_place = a_mask(w);
    }
    if ((more & 1) != 0) {
        d->clobbers = some_overwrites(w);
    }
    d->grads_in_forward = (more & 2) != 0 ? a_mask(w) : 0;
    d->optional_saved = (more & 4) != 0 ? a_mask(w) : 0;
    d->no_recompute = (more & 8) != 0;
    d->recompute_keeps_state = (more & 16) != 0;
    d->no_backward = (more & 32) != 0;
    if ((more & 64) != 0) {
        d->forward_workspace = a_workspace(w);
        d->backward_workspace = a_workspace(w);
        d->recompute_workspace = a_workspace(w);
    }
    d->flops = (more & 128) != 0 ? (double)below(w, 200) - 1.0 : 0.0;
    d->recompute_flops = one_in(w, 32) ? (double)NAN : 0.0;
    d->dtypes = some_dtypes(w, d);
}

static void op_wild_layer(world *w, slot *s) {
    s->may_refuse = true;
    if (s->layer_count < LAYERS) {
        layer_info *layer = &s->layers[s->layer_count];
        memset(layer, 0, sizeof *layer);
        fill_desc(w, s, &layer->desc);
        register_layer(s, layer, false);
        if (layer->handle.id != 0 && one_in(w, 2)) {
            ms_set_loss(s->model, layer->desc.out[0]);
        }
    }
}

// ------------------------------------------------------------------------------------------------
// operations: setters

static float a_rate(world *w) {
    static const float rates[] = {0.01f, 0.0f, 1.0f, -0.5f, 1e30f, NAN, INFINITY};
    return rates[below(w, 7)];
}

static ms_optimizer_desc an_optimizer(world *w, slot *s) {
    static const float norms[] = {0.0f, 0.5f, 1e-3f, 1e3f, FLT_MAX, -1.0f, NAN, INFINITY};
    ms_optimizer_desc d;
    const uint32_t x = take(w), y = take(w);
    memset(&d, 0, sizeof d);
    d.kind = (ms_optimizer_kind)(x % MS_OPTIMIZER_COUNT + (x == 255 ? MS_OPTIMIZER_COUNT : 0));
    d.grad_clip_norm = (x & 32) != 0 ? norms[below(w, 8)] : 0.0f;
    d.skip_above_norm = (y & 7) == 7 ? norms[below(w, 8)] : 0.0f;
    d.momentum = (x & 16) != 0 ? 0.9f : 0.0f;
    d.learning_rate = (x & 64) != 0 ? a_rate(w) : 0.0f;
    d.beta1 = (x & 128) != 0 ? a_rate(w) : 0.0f;
    d.beta2 = (y & 128) != 0 ? a_rate(w) : 0.0f;
    d.state_format[x >> 4 & 1] = (x & 12) == 12 ? (ms_state_format)(x >> 5 & 3) : d.state_format[0];
    if (d.kind == MS_OPTIMIZER_CUSTOM || y == 253) {
        const uint32_t number = s->update_count % UPDATES;
        update_info *u = &s->updates[number];
        if (s->update_count < UPDATES) { // it stays as it is from then on
            u->owner = s;
            u->bytes = below(w, 16) == 15 ? UINT64_MAX - take(w) : below(w, 9);
            s->update_count += 1;
        }
        d.update = x != 254 ? fz_custom : NULL;
        d.user = u;
        d.workspace = (y & 8) != 0 ? fz_update_bytes : NULL;
        u->bytes = d.workspace == NULL && number + 1 == s->update_count ? 0 : u->bytes;
        d.workspace = u->bytes != 0 ? fz_update_bytes : d.workspace;
        d.state_count = below(w, 6);
        d.takes_formats = (y & 16) != 0;
        d.unsigned_state = (y & 32) != 0 ? below(w, 5) : 0;
    }
    return d;
}

static void op_optimizer(world *w, slot *s) {
    s->may_refuse = true;
    const ms_optimizer_desc d = an_optimizer(w, s);
    ms_set_optimizer(s->model, one_in(w, 64) ? NULL : &d);
}

/* A group, of another model at times, or a wrong handle. */
static ms_param_group a_group(world *w, const slot *s) {
    const uint32_t x = take(w);
    const slot *from = x >= 248 ? &w->slots[(w->current + 1) % MODELS] : s;
    const ms_param_group wrong = {x >= 240 ? take(w) | (uint32_t)take(w) << 24 : 0};
    return x < 240 && x % 5 != 0 && from->group_count > 0 ? from->groups[x % from->group_count]
           : x >= 248 && from->group_count > 0            ? from->groups[0]
                                                          : wrong;
}

static void op_group(world *w, slot *s) {
    s->may_refuse = true;
    if (s->group_count < GROUPS && one_in(w, 2)) {
        const ms_optimizer_desc d = an_optimizer(w, s);
        const ms_param_group group = ms_optimizer_group(s->model, one_in(w, 64) ? NULL : &d);
        CHECK(group.id != 0 || s->model == NULL || ms_last_error(s->model)[0] != 0);
        s->has_refused = s->has_refused || (group.id == 0 && !s->has_plan);
        if (group.id != 0) {
            s->groups[s->group_count++] = group;
        }
    }
    for (uint32_t n = below(w, 4); n > 0; --n) {
        const ms_tensor t = one_in(w, 8) ? a_tensor(w, s) : a_tensor_of(w, s, KIND_PARAM);
        ms_set_param_group(s->model, t, a_group(w, s));
    }
}

static void set_layer_time(world *w, slot *s) {
    const ms_layer_time time = {(double)a_rate(w), 1.0, 1.0};
    ms_set_layer_time(s->model, a_layer(w, s), &time);
}

static void op_set_value(world *w, slot *s) {
    s->may_refuse = true;
    ms_layer layer;
    const uint32_t what = below(w, 22);
    const ms_tensor t = a_tensor(w, s);
    switch (what) {
    case 0:
        ms_set_learning_rate(s->model, a_rate(w));
        break;
    case 1:
        ms_set_weight_decay(s->model, t, a_rate(w));
        break;
    case 2:
        ms_set_frozen(s->model, t, one_in(w, 2));
        break;
    case 3:
    case 4:
        ms_set_budget(s->model, a_budget(w));
        break;
    case 5:
        ms_set_accumulation(s->model, below(w, 4));
        break;
    case 6:
        layer = a_layer(w, s);
        ms_set_layer_technique(s->model, layer, (ms_technique)below(w, MS_TECHNIQUE_COUNT + 1),
                               a_switch(w));
        break;
    case 7:
        ms_set_tensor_technique(s->model, t, (ms_technique)below(w, MS_TECHNIQUE_COUNT + 1),
                                a_switch(w));
        break;
    case 8:
        ms_set_loss_factor(s->model, a_rate(w));
        break;
    case 9:
        ms_add_output(s->model, t);
        break;
    case 10:
        ms_add_eval_output(s->model, t);
        break;
    case 11:
    case 12:
        ms_set_group_learning_rate(s->model, a_group(w, s), a_rate(w));
        break;
    case 13:
    case 14:
        told(s, ms_set_paused(s->model, t, !one_in(w, 3)));
        break;
    case 15:
    case 16:
        told(s, ms_set_gradient_factor(s->model, a_rate(w)));
        break;
    case 17:
        told(s, ms_set_update_count(s->model, t, (uint64_t)take(w) << below(w, 48)));
        CHECK(ms_tensor_dtype(s->model, t) <= MS_DTYPE_COUNT);
        CHECK(ms_update_count(s->model, t) == 0 || s->model != NULL);
        break;
    case 18:
        told(s, ms_set_step_count(s->model, (uint64_t)take(w) << below(w, 48)));
        break;
    case 19:
        ms_set_loss_mean(s->model);
        break;
    case 20:
        set_layer_time(w, s);
        break;
    default:
        ms_set_loss(s->model, t);
        break;
    }
}

static void op_mark(world *w, slot *s) {
    s->may_refuse = true;
    const uint32_t x = take(w);
    if (x == 255) {
        ms_refuse(s->model, "the fuzzer says so");
        s->has_refused = s->has_refused || !s->has_plan;
    } else if ((x & 12) == 4) {
        ms_want_gradient(s->model, one_in(w, 8)    ? a_tensor(w, s)
                                   : (x & 16) != 0 ? a_tensor_of(w, s, KIND_INPUT)
                                                   : a_tensor_of(w, s, KIND_ACTIVATION));
    } else if ((x & 12) == 8 && s->layer_count < LAYERS && (x & 2) != 0) {
        // of an activation that the layer to come will make; others have theirs already
        const ms_tensor t = add_tensor(s, KIND_ACTIVATION, MS_DTYPE_F32, s->shape);
        ms_set_gradient_dtype(s->model, one_in(w, 8) ? a_tensor(w, s) : t,
                              (ms_dtype)(one_in(w, 4) ? below(w, 12) : (uint32_t)MS_DTYPE_BF16));
        make_layer(w, s, t);
    } else if ((x & 1) != 0) {
        ms_set_on_host(s->model, a_tensor_of(w, s, (x & 2) != 0 ? KIND_BUFFER : KIND_INPUT));
    } else {
        ms_stop_gradient(s->model, a_tensor_of(w, s, KIND_ACTIVATION));
    }
}

// ------------------------------------------------------------------------------------------------
// operations: plans

static void *exact_block(uint64_t bytes) {
    void *memory = malloc(bytes == 0 ? 1 : (size_t)bytes);
    CHECK(memory != NULL);
    memset(memory, 0, bytes == 0 ? 1 : (size_t)bytes);
    return memory;
}

/* Values for all inputs and params that have none: without them there is no step. */
static void write_missing(const slot *s) {
    const msi_graph *g = &s->model->graph;
    for (uint32_t t = 0; t < g->tensors.count; ++t) {
        const ms_tensor handle = msi_handle(g, t, MSI_ROLE_VALUE);
        const bool given = g->tensors.items[t].kind == MSI_KIND_INPUT ||
                           g->tensors.items[t].kind == MSI_KIND_PARAM;
        if (given && !g->tensors.items[t].written && ms_tensor_bytes(s->model, handle) < 1u << 20) {
            const uint64_t bytes = ms_tensor_bytes(s->model, handle);
            void *data = exact_block(bytes);
            memset(data, 0, (size_t)bytes);
            told(s, ms_write(s->model, handle, data));
            free(data);
        }
    }
}

static void op_wrap(world *w, slot *s) {
    const uint64_t faults = w->faults;
    const ms_result result = told(s, ms_wrap(s->model));
    CHECK(!s->has_refused || result != MS_RESULT_OK);
    if (result != MS_RESULT_OK) {
        return;
    }
    CHECK(s->layer_count > 0);
    s->has_plan = true;
    write_missing(s);
    check_report(s, true);
    const uint64_t plan = plan_digest(s);
    const ms_result again = told(s, ms_wrap(s->model));
    CHECK(again == MS_RESULT_OK || faults != w->faults);
    const uint64_t same = again == MS_RESULT_OK ? plan_digest(s) : 0;
    CHECK(plan == same || plan == 0 || same == 0);
}

static void op_detach(world *w, slot *s) {
    const uint64_t faults = w->faults;
    const bool had_plan = s->has_plan;
    const ms_result result = told(s, ms_detach(s->model));
    CHECK(!s->has_refused || result != MS_RESULT_OK);
    CHECK(result != MS_RESULT_BUDGET);
    CHECK(!had_plan || result == MS_RESULT_OK || result == MS_RESULT_ORDER ||
          result == MS_RESULT_INVALID || faults != w->faults);
    s->has_plan = s->has_plan || result == MS_RESULT_OK;
    check_report(s, false);
}

static void op_smallest(world *w, slot *s) {
    uint64_t bytes = 0;
    const uint64_t faults = w->faults;
    if (told(s, ms_smallest_budget(s->model, &bytes)) != MS_RESULT_OK) {
        return;
    }
    if (one_in(w, 2) && bytes > 1 && !s->config.force_optimize) {
        ms_set_budget(s->model, bytes - 1);
        CHECK(told(s, ms_wrap(s->model)) != MS_RESULT_OK);
    }
    ms_set_budget(s->model, bytes == 0 ? 1 : bytes);
    ms_result result = told(s, ms_wrap(s->model));
    if (result != MS_RESULT_OK && s->has_plan) { // it returns once what was refused before
        result = told(s, ms_wrap(s->model));
    }
    // ORDER: gradients of micro-batches would be lost
    CHECK(result == MS_RESULT_OK || result == MS_RESULT_ORDER || faults != w->faults);
    s->has_plan = s->has_plan || result == MS_RESULT_OK;
    check_report(s, result == MS_RESULT_OK);
}

static void op_reshape(world *w, slot *s) {
    int64_t sizes[MS_LIMIT_AXES];
    for (uint32_t i = 0; i < s->axis_count; ++i) {
        sizes[i] = 1 + (int64_t)below(w, (uint32_t)s->largest[i] + (one_in(w, 16) ? 1 : 0));
    }
    const ms_result result = told(s, ms_reshape(s->model, sizes));
    if (result == MS_RESULT_OK && s->axis_count > 0) {
        const ms_shape now =
            s->value_count > 0 ? ms_tensor_shape(s->model, s->values[0]) : s->shape;
        CHECK(now.rank >= 0);
        s->shape = now;
    }
}

static void visit(const ms_event *event, void *user) {
    const uint64_t *limits = (const uint64_t *)user;
    CHECK(event->size == sizeof *event && event->kind < MS_EVENT_COUNT && event->name != NULL);
    uint64_t sum = 0;
    for (int c = 0; c < MS_CATEGORY_COUNT; ++c) {
        sum += event->live_bytes_of[c];
    }
    CHECK(event->live_bytes <= limits[0] && event->live_bytes == sum);
    CHECK(event->start_us >= 0.0 && event->duration_us >= 0.0 && event->measured_us >= 0.0);
    for (uint32_t i = 0; i < event->operand_count; ++i) {
        const ms_event_operand *o = &event->operands[i];
        CHECK(o->kind < MS_OPERAND_COUNT);
        CHECK(o->is_outside || (o->offset % 64 == 0 && o->offset + o->bytes <= limits[0]));
    }
}

static void visit_lifetime(const ms_lifetime *l, void *user) {
    const uint64_t *limits = (const uint64_t *)user;
    CHECK(l->size == sizeof *l && l->name != NULL && l->category < MS_CATEGORY_COUNT);
    CHECK(l->is_on_host || l->first > l->last || l->offset + l->bytes <= limits[0]);
}

static void op_look(world *w, slot *s) {
    uint64_t h = 0, limit;
    ms_memory_report r;
    ms_hardware hardware;
    const ms_program program = (ms_program)below(w, 3);
    memset(&r, 0, sizeof r);
    const ms_result result = told_nothing(ms_report(s->model, &r));
    CHECK((result == MS_RESULT_OK) == s->has_plan);
    limit = r.arena_bytes;
    told_nothing(ms_print_plan(s->model, digest_text, &h));
    told_nothing(ms_print_plan_full(s->model, digest_text, &h));
    uint32_t decisions = 0;
    const ms_result visited =
        told_nothing(ms_visit_decisions(s->model, check_decision, &decisions));
    CHECK(visited != MS_RESULT_OK || decisions == r.layer_count * MS_TECHNIQUE_COUNT);
    CHECK((told_nothing(ms_profile_save(s->model, digest_text, &h)) == MS_RESULT_OK) ==
          s->has_plan);
    told_nothing(ms_print_program(s->model, program, digest_text, &h));
    const uint64_t faults = w->faults;
    const ms_result traced = told_nothing(ms_print_trace(s->model, digest_text, &h));
    CHECK((traced == MS_RESULT_OK) == s->has_plan ||
          (traced == MS_RESULT_OUT_OF_MEMORY && faults != w->faults));
    CHECK((told_nothing(ms_print_metrics(s->model, digest_text, &h)) == MS_RESULT_OK) ==
          s->has_plan);
    told_nothing(ms_visit_events(s->model, program, visit, &limit));
    told_nothing(ms_visit_lifetimes(s->model, program, visit_lifetime, &limit));
    told(s, ms_hardware_report(s->model, &hardware));
    check_report(s, false);
}

// ------------------------------------------------------------------------------------------------
// operations: values

/* Any tensor, its gradient, or its state. */
static ms_tensor a_handle(world *w, slot *s) {
    const ms_tensor t = a_tensor(w, s);
    switch (below(w, 4)) {
    case 0:
        return ms_gradient(s->model, t);
    case 1:
        return ms_optimizer_state(s->model, t, (int)below(w, 6) - 1);
    default:
        return t;
    }
}

/* Whether some value or state may be in fewer bits than the trainer gives. */
static bool rounds(const slot *s) {
    ms_memory_report r;
    bool some = s->config.mixed_precision == MS_SWITCH_ON ||
                s->config.optimizer_8bit != MS_SWITCH_OFF || s->model == NULL;
    memset(&r, 0, sizeof r);
    some |= s->model == NULL || ms_report(s->model, &r) != MS_RESULT_OK;
    for (uint32_t t = 0; !some && t < s->model->graph.tensors.count; ++t) {
        const msi_tensor *x = &s->model->graph.tensors.items[t];
        const ms_optimizer_desc *o = msi_desc_of(&s->model->optimizers, x);
        some = x->technique[MS_TECHNIQUE_MIXED_PRECISION] == MS_SWITCH_ON ||
               x->technique[MS_TECHNIQUE_OPTIMIZER_8BIT] == MS_SWITCH_ON ||
               o->state_format[0] != MS_STATE_FORMAT_F32 ||
               o->state_format[1] != MS_STATE_FORMAT_F32;
    }
    return some;
}

static void op_write(world *w, slot *s) {
    const ms_tensor t = a_handle(w, s);
    const uint64_t bytes = ms_tensor_bytes(s->model, t);
    if (bytes > LARGEST_BLOCK) {
        return;
    }
    void *data = exact_block(bytes);
    put(data, MS_DTYPE_F32, (size_t)(bytes & ~(uint64_t)3), take(w), false);
    const ms_result result = told(s, ms_write(s->model, t, data));
    if (result == MS_RESULT_OK) {
        void *copy = exact_block(bytes);
        const ms_result read = told(s, ms_read(s->model, t, copy));
        CHECK(read != MS_RESULT_OK || rounds(s) || memcmp(copy, data, (size_t)bytes) == 0);
        free(copy);
    }
    free(data);
}

static void op_read(world *w, slot *s) {
    const ms_tensor t = a_handle(w, s);
    const uint64_t bytes = ms_tensor_bytes(s->model, t);
    const ms_shape shape = ms_tensor_shape(s->model, t);
    CHECK((shape.rank == -1) == (bytes == 0));
    CHECK(bytes == 0 || ms_shape_count(&shape) == ms_tensor_count(s->model, t));
    if (bytes > LARGEST_BLOCK) {
        return;
    }
    void *data = exact_block(bytes);
    const uint64_t faults = w->faults;
    const ms_result result = told(s, ms_read(s->model, t, data));
    void *direct = ms_data(s->model, t);
    if (faults == w->faults && s->has_plan) {
        CHECK((direct != NULL) == (result == MS_RESULT_OK));
    }
    if (direct != NULL && result == MS_RESULT_OK && faults == w->faults) {
        CHECK(memcmp(direct, data, (size_t)bytes) == 0);
    }
    free(data);
}

static void op_write_inputs(world *w, slot *s) {
    for (uint32_t i = 0; i < s->tensor_count; ++i) {
        const uint64_t bytes = ms_tensor_bytes(s->model, s->tensors[i]);
        if ((s->kinds[i] == KIND_INPUT || s->kinds[i] == KIND_PARAM) && bytes <= LARGEST_BLOCK) {
            void *data = exact_block(bytes);
            put(data, MS_DTYPE_F32, (size_t)(bytes & ~(uint64_t)3), i + 3u * take(w), false);
            told(s, ms_write(s->model, s->tensors[i], data));
            free(data);
        }
    }
}

/* Memory for the largest size of a tensor. */
static void op_borrow(world *w, slot *s) {
    s->may_refuse = true;
    const ms_tensor base = a_tensor(w, s);
    const uint32_t what = below(w, 3);
    const ms_tensor t = what == 0   ? base
                        : what == 1 ? ms_gradient(s->model, base)
                                    : ms_optimizer_state(s->model, base, 0);
    const ms_shape shape = ms_tensor_shape(s->model, t);
    uint64_t bytes = ms_tensor_bytes(s->model, t);
    for (int i = 0; i < MS_LIMIT_RANK && shape.rank > 0; ++i) {
        bytes *= shape.axes[i] != 0 ? 64 : 1;
    }
    if (s->loan_count == LENT || bytes > LARGEST_BLOCK) {
        return;
    }
    lent *loan = &s->loans[s->loan_count];
    loan->tensor = t;
    loan->bytes = bytes;
    loan->memory = (float *)exact_block(bytes);
    loan->is_gradient = what == 1;
    if (told(s, ms_borrow(s->model, t, loan->memory)) == MS_RESULT_OK) {
        s->loan_count += 1;
    } else {
        s->has_refused = s->has_refused || !s->has_plan;
        free(loan->memory);
    }
}

// ------------------------------------------------------------------------------------------------
// operations: steps

static void op_step(world *w, slot *s) {
    double loss = 0.0;
    for (uint32_t n = 1 + below(w, 4); n > 0; --n) {
        const uint64_t faults = w->faults;
        const ms_result result = ms_step(s->model, &loss);
        check_step(s, result, faults == w->faults);
        CHECK(result != MS_RESULT_OK || (s->has_plan && !s->has_refused));
    }
}

static void op_part_of_a_step(world *w, slot *s) {
    double value = 0.0;
    ms_result result;
    const uint64_t faults = w->faults;
    switch (below(w, 6)) {
    case 5:
        told(s, ms_set_gradient_factor(s->model, one_in(w, 8) ? a_rate(w) : 0.5f));
        return;
    case 0:
        result = ms_forward(s->model, &value);
        break;
    case 1:
        result = ms_backward(s->model);
        break;
    case 2:
        result = ms_update(s->model);
        break;
    case 3:
        result = ms_eval(s->model, NULL);
        break;
    default:
        told(s, ms_gradient_norm(s->model, &value));
        return;
    }
    check_step(s, result, faults == w->faults);
}

static void op_slices(world *w, slot *s) {
    double loss = 0.0;
    ms_result result = MS_RESULT_MORE;
    w->look_us = 1.0;
    for (uint32_t n = 1 + below(w, 16); n > 0 && result == MS_RESULT_MORE; --n) {
        const uint64_t faults = w->faults;
        result = ms_step_slice(s->model, below(w, 32), &loss);
        CHECK(result != MS_RESULT_MORE || (s->has_plan && !s->has_refused));
        if (result != MS_RESULT_MORE) {
            check_step(s, result, faults == w->faults);
        }
    }
    w->look_us = 1000.0;
}

static void op_cancel(world *w, slot *s) {
    (void)w;
    ms_cancel(s->model);
}

/* What can be read of params and buffers, as a number. */
static uint64_t values_digest(const slot *s) {
    uint64_t h = 1;
    for (uint32_t i = 0; i < s->tensor_count; ++i) {
        const uint64_t bytes = ms_tensor_bytes(s->model, s->tensors[i]);
        if ((s->kinds[i] == KIND_PARAM || s->kinds[i] == KIND_BUFFER) && bytes <= LARGEST_BLOCK) {
            void *data = exact_block(bytes);
            const ms_result result = ms_read(s->model, s->tensors[i], data);
            h = digest(h, &result, sizeof result);
            h = result == MS_RESULT_OK ? digest(h, data, (size_t)bytes) : h;
            free(data);
        }
    }
    return h;
}

/* A model that gives its memory up, and takes it again, keeps what it holds. */
static void op_suspend(world *w, slot *s) {
    const bool lends = one_in(w, 2), resumes = one_in(w, 2);
    const uint64_t bytes = ms_suspended_bytes(s->model), faults = w->faults;
    const uint64_t before = values_digest(s);
    ms_memory_report r;
    CHECK(bytes == 0 || ms_report(s->model, &r) != MS_RESULT_OK || bytes <= r.arena_bytes + 64);
    void *image = lends && bytes <= LARGEST_BLOCK ? exact_block(bytes) : NULL;
    const ms_result suspended = told(s, ms_suspend(s->model, image));
    if (suspended == MS_RESULT_OK) {
        free(s->image);
        s->image = image;
    } else {
        free(image);
    }
    CHECK(suspended != MS_RESULT_OK || s->has_plan);
    if (suspended == MS_RESULT_OK && resumes) {
        CHECK(told(s, ms_resume(s->model)) == MS_RESULT_OK || faults != w->faults);
        CHECK(faults != w->faults || values_digest(s) == before);
    }
}

static void op_resume(world *w, slot *s) {
    (void)w;
    told(s, ms_resume(s->model));
}

static void op_optimize(world *w, slot *s) {
    (void)w;
    MS_OPTIMIZE(s->model) {
        s->has_plan = true;
        check_step(s, ms_step(s->model, NULL), false);
    }
}

/* One forward and backward: loss and gradients as a number; 0 where there was an error. */
static uint64_t gradients_digest(slot *s, bool with_backward) {
    double loss = 0.0;
    uint64_t h = 1;
    for (uint32_t i = 0; i < s->loan_count; ++i) {
        if (s->loans[i].is_gradient) {
            memset(s->loans[i].memory, 0, (size_t)s->loans[i].bytes);
        }
    }
    if (told(s, ms_forward(s->model, &loss)) != MS_RESULT_OK ||
        (with_backward && told(s, ms_backward(s->model)) != MS_RESULT_OK)) {
        return 0;
    }
    h = digest(h, &loss, sizeof loss);
    for (uint32_t i = 0; i < s->tensor_count && with_backward; ++i) {
        const ms_tensor g = ms_gradient(s->model, s->tensors[i]);
        const uint64_t bytes = ms_tensor_bytes(s->model, g);
        if (g.id != 0 && bytes <= LARGEST_BLOCK) {
            void *data = exact_block(bytes);
            const bool is_there = ms_read(s->model, g, data) == MS_RESULT_OK;
            h = is_there ? digest(h, data, (size_t)bytes) : h;
            free(data);
        }
    }
    return h;
}

typedef struct shelf {
    void *data[TENSORS];
} shelf;

/* Keeps the buffers, which forward changes, or puts them back. */
static void shelve(slot *s, shelf *on, bool back) {
    for (uint32_t i = 0; i < s->tensor_count; ++i) {
        const uint64_t bytes = ms_tensor_bytes(s->model, s->tensors[i]);
        if (s->kinds[i] != KIND_BUFFER || bytes > LARGEST_BLOCK) {
            continue;
        }
        if (!back) {
            on->data[i] = exact_block(bytes);
            told(s, ms_read(s->model, s->tensors[i], on->data[i]));
        } else if (on->data[i] != NULL) {
            told(s, ms_write(s->model, s->tensors[i], on->data[i]));
        }
    }
}

/* Plans when no step is under way. */
static ms_result plan_anew(slot *s, uint32_t micro_count, ms_result (*plan)(ms_model *)) {
    ms_cancel(s->model); // which gives up the micro-batches that are done, where it ends a step
    if (told(s, ms_step_slice(s->model, 1, NULL)) != MS_RESULT_CANCELLED) {
        told(s, ms_eval(s->model, NULL));
    }
    ms_set_accumulation(s->model, micro_count);
    return msi_flag_is_set(&s->model->cancel) ? MS_RESULT_ORDER : told(s, plan(s->model));
}

/* The present plan changes no number: the plain one gives the same loss and gradients. */
static void compare_with_plain(world *w, slot *s, uint32_t micro_count) {
    ms_memory_report r;
    shelf buffers;
    memset(&r, 0, sizeof r);
    CHECK(ms_report(s->model, &r) == MS_RESULT_OK);
    memset(&buffers, 0, sizeof buffers);
    const uint64_t faults = w->faults;
    shelve(s, &buffers, false);
    show_plan(s);
    const uint64_t planned = gradients_digest(s, !r.early_update);
    const ms_result detached = plan_anew(s, micro_count, ms_detach);
    CHECK(detached == MS_RESULT_OK || faults != w->faults || msi_flag_is_set(&s->model->cancel));
    show_plan(s);
    shelve(s, &buffers, true);
    const uint64_t plain = gradients_digest(s, !r.early_update);
    CHECK(planned == plain || detached != MS_RESULT_OK || faults != w->faults || rounds(s));
    for (uint32_t i = 0; i < TENSORS; ++i) {
        free(buffers.data[i]);
    }
}

/* Whether two passes can be compared: nothing fails, and nothing is to end the first one. */
static bool can_compare(world *w, const slot *s) {
    w->allocation_fails_in = w->backend_fails_in = w->callback_fails_in = 0;
    return s->has_plan && !s->config.dry_run && !msi_flag_is_set(&s->model->cancel);
}

static void op_compare(world *w, slot *s) {
    const uint32_t micro_count = 1 + below(w, 3);
    if (can_compare(w, s) && plan_anew(s, micro_count, ms_wrap) == MS_RESULT_OK) {
        compare_with_plain(w, s, micro_count);
    }
}

/* The library compares too. */
static void op_verify(world *w, slot *s) {
    ms_verify_report r;
    ms_nonfinite found;
    const uint64_t faults = w->faults;
    const ms_result result = told(s, ms_verify(s->model, NULL, NULL, &r));
    CHECK(result != MS_RESULT_OK || faults != w->faults || r.differ_count == 0 || rounds(s));
    told(s, ms_find_nonfinite(s->model, &found));
}

// ------------------------------------------------------------------------------------------------
// operations: files

/* Another model may load it. */
static void op_save_plan(world *w, slot *s) {
    const ms_sink sink = plan_sink(w);
    w->plan.bytes = 0;
    const ms_result result = told(s, ms_plan_save(s->model, one_in(w, 32) ? NULL : &sink));
    CHECK(result != MS_RESULT_OK || s->has_plan);
    w->plan.bytes = result == MS_RESULT_OK ? w->plan.bytes : 0;
}

static void change_bytes(world *w, file_image *f, size_t first) {
    for (uint32_t n = below(w, 4); n > 0 && f->bytes > first; --n) {
        const size_t at = first + ((size_t)take(w) << 8 | take(w)) % (f->bytes - first);
        f->data[at] = (uint8_t)(one_in(w, 2) ? take(w) : (uint32_t)f->data[at] ^ 1u << below(w, 7));
    }
}

/* A plan that was changed is refused, or gives the numbers of the plain one. */
static void op_load_plan(world *w, slot *s) {
    static file_image f;
    const uint32_t micro_count = s->model != NULL ? s->model->config.accumulation_steps : 0;
    const bool is_clean = can_compare(w, s) && plan_anew(s, micro_count, ms_detach) == MS_RESULT_OK;
    const bool is_changed = one_in(w, 4);
    const uint64_t faults = w->faults;
    f = w->plan;
    if (is_changed && f.bytes > MSI_PLAN_SUM_BYTES) {
        change_bytes(w, &f,
                     one_in(w, 4)   ? 0
                     : f.bytes < 99 ? f.bytes / 2
                                    : (size_t)PLAN_FILES_HEAD);
        plan_file_mend(f.data, f.bytes);
    }
    ms_result result = MS_RESULT_INVALID;
    for (int mends = 0; mends < 4 && result == MS_RESULT_INVALID; ++mends) {
        const ms_source source = source_of(&f);
        result = told(s, ms_plan_load(s->model, &source));
        result = result == MS_RESULT_OK ? told(s, ms_wrap(s->model)) : result;
        if (!is_changed || result != MS_RESULT_INVALID ||
            !plan_file_mend_programs(f.data, &f.bytes, ms_last_error(s->model))) {
            break;
        }
    }
    CHECK(!s->has_refused || result != MS_RESULT_OK);
    if (result != MS_RESULT_OK) {
        return;
    }
    s->has_plan = true;
    write_missing(s);
    check_report(s, true);
    CHECK(faults != w->faults || plan_digest(s) != 0);
    if (is_clean) {
        compare_with_plain(w, s, micro_count);
    }
}

/* What is saved is loaded again, by any model. */
static void op_files(world *w, slot *s) {
    if (one_in(w, 2)) {
        const ms_sink sink = {write_file, &w->run};
        w->run.bytes = 0;
        told(s, ms_save(s->model, &sink));
    } else {
        const ms_source source = source_of(&w->run);
        const ms_load_options options = {one_in(w, 2), one_in(w, 2), true, NULL, NULL, NULL};
        told(s, ms_load(s->model, &source, &options));
    }
}

// ------------------------------------------------------------------------------------------------
// one input

typedef struct operation {
    const char *name;
    void (*run)(world *w, slot *s);
} operation;

static const operation operations[] = {
    {"create", op_create},
    {"several layers", op_several_layers},
    {"loss", op_loss},
    {"wrap", op_wrap},
    {"step", op_step},
    {"compare", op_compare},
    {"smallest", op_smallest},
    {"detach", op_detach},
    {"write inputs", op_write_inputs},
    {"part of a step", op_part_of_a_step},
    {"tensor", op_tensor},
    {"axis", op_axis},
    {"good layer", op_good_layer},
    {"wild layer", op_wild_layer},
    {"optimizer", op_optimizer},
    {"set value", op_set_value},
    {"mark", op_mark},
    {"reshape", op_reshape},
    {"look", op_look},
    {"write", op_write},
    {"read", op_read},
    {"borrow", op_borrow},
    {"optimize", op_optimize},
    {"fail soon", op_fail_soon},
    {"arena", op_arena},
    {"other model", op_other_model},
    {"destroy", op_destroy},
    {"slices", op_slices},
    {"cancel", op_cancel},
    {"suspend", op_suspend},
    {"resume", op_resume},
    {"group", op_group},
    {"save plan", op_save_plan},
    {"load plan", op_load_plan},
    {"verify", op_verify},
    {"files", op_files},
};
enum { OPERATIONS = sizeof operations / sizeof operations[0] };

static void run_input(const uint8_t *data, size_t size) {
    world *w = (world *)calloc(1, sizeof *w);
    CHECK(w != NULL);
    w->data = data;
    w->size = size;
    w->look_us = 1000.0;
    w->cpu = ms_backend_cpu();
    w->cpu.open = NULL; // all functions receive user
    w->cpu.close = NULL;
    w->cpu.prepare = NULL;
    w->cpu.query = NULL;
    w->cpu.has_copy_streams = false;
    w->cpu.copy_in = w->cpu.copy_out = w->cpu.copy;
    for (uint32_t i = 0; i < MODELS; ++i) {
        w->slots[i].world = w;
    }
    if (size > 0 && (data[0] & 0x80) != 0) { // at once a small model
        op_create(w, &w->slots[0]);
        op_several_layers(w, &w->slots[0]);
        op_loss(w, &w->slots[0]);
    }
    for (uint32_t n = 0; n < CALLS && w->at < w->size; ++n) {
        const operation *now = &operations[below(w, OPERATIONS)];
        trace("model %u: %s", (unsigned)w->current, now->name);
        now->run(w, &w->slots[w->current]);
    }
    ms_arena_destroy(w->arena); // the memory goes with the last model
    for (uint32_t i = 0; i < MODELS; ++i) {
        op_destroy(w, &w->slots[i]);
    }
    CHECK(w->live_blocks == 0 && w->live_bytes == 0);
    free(w);
}

#include "fuzz.h"

#ifndef FUZZ_LIBRARY

int main(int argc, char **argv) {
    is_traced = argc > 1 && strcmp(argv[1], "-v") == 0;
    const int first = is_traced ? 2 : 1;
    return fuzz_files(argv + first, argc - first);
}

#endif
