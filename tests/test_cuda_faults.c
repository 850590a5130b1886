/*  test_cuda_faults.c - every call of CUDA and cuBLAS, and every host allocation, fails once in a
    model's life; what is asked for is not there; and nets that catch fish: an order between streams
    that is left out is a wrong number. All of it asks the emulation. */
#include "testing_cuda.h"

#ifdef CUDART_EMULATION

// ------------------------------------------------------------------------------------------------
// a life in which one call fails

enum { SCRIPT_STEPS = 3 };

typedef struct trial {
    const char *name;
    cn_how how;
    bool shares;
    uint64_t every; // so many calls one is failed
} trial;

enum { TRIALS = 6 };

static void make_trials(trial *trials) {
    static const char *const names[TRIALS] = {"plain, by cuBLAS",         "graph",
                                              "accumulated, clipped",     "own update, own memory",
                                              "shared arena, own stream", "moves, graph"};
    static const uint64_t every[TRIALS] = {1, 1, 3, 3, 3, 15}; // the last one takes long to plan
    memset(trials, 0, TRIALS * sizeof *trials);
    for (int i = 0; i < TRIALS; i++) {
        trials[i].name = names[i];
        trials[i].every = every[i];
        trials[i].how.cuda = true;
        trials[i].how.smallest = i % 2 != 0;
    }
    trials[0].how.by_gemm = true;
    trials[1].how.graph = trials[5].how.graph = trials[5].how.offloads = true;
    trials[2].how.micro_count = 2;
    trials[2].how.clip = 0.05f;
    trials[3].how.optimizer = MS_OPTIMIZER_CUSTOM;
    trials[3].how.borrows = true;
    trials[4].shares = true;
    trials[4].how.host_scale = true;
}

/* What the run of a script knows. */
typedef struct run {
    cn_net net;
    const trial *of;
    const char *where, *failed_where;
    uint32_t errors;   // that were reported
    uint32_t failures; // MS_RESULT_FAILED
    t_heap arena_heap;
} run;

/* Notes where a call has failed that nobody reported. */
static void enter_place(run *r, const char *where) {
    if (!r->failed_where && emulation_failed()) {
        r->failed_where = r->where;
    }
    r->where = where;
}

static __global__ void k_nothing() {
}

/* The host's own launch goes well, and the error was told. */
static void note_error(run *r, ms_result result) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(1);
    r->errors++;
    assert_true(result != MS_RESULT_OK);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    assert_int_equal(cudaLaunchKernelEx(&config, k_nothing), cudaSuccess);
    if (r->net.model && strcmp(r->where, "lend") != 0) { // that memory is the trainer's own
        assert_true(strlen(ms_last_error(r->net.model)) > 20);
    }
}

/* Once more where it failed: a second time nothing fails. */
#define RETRY(r, place, call)                                                                      \
    do {                                                                                           \
        enter_place((r), (place));                                                                 \
        const ms_result first_result = (call);                                                     \
        if (first_result != MS_RESULT_OK) {                                                        \
            note_error((r), first_result);                                                         \
            t_ok((r)->net.model, (call));                                                          \
        }                                                                                          \
    } while (0)

/* What lives between steps, as a checkpoint of the host has it. No call that could fail. */
static void take_checkpoint(cn_net *net, cn_values *values) {
    memset(values, 0, sizeof *values);
    emulation_finish();
    for (uint32_t i = 0; i < net->param_count; i++) {
        for (int k = -1; k < cn_state_count(&net->how); k++) {
            const ms_tensor t =
                k < 0 ? net->param[i] : ms_optimizer_state(net->model, net->param[i], k);
            emulation_peek(values->at + values->count, ms_data(net->model, t),
                           (size_t)ms_tensor_bytes(net->model, t));
            values->count += cn_count(net, t);
        }
    }
    emulation_peek(values->at + values->count, ms_data(net->model, net->moving),
                   CN_COLS * sizeof(float));
}

static void put_checkpoint(cn_net *net, const cn_values *values) {
    uint64_t at = 0;
    for (uint32_t i = 0; i < net->param_count; i++) {
        for (int k = -1; k < cn_state_count(&net->how); k++) {
            const ms_tensor t =
                k < 0 ? net->param[i] : ms_optimizer_state(net->model, net->param[i], k);
            t_ok(net->model, ms_write(net->model, t, values->at + at));
            at += cn_count(net, t);
        }
    }
    t_ok(net->model, ms_write(net->model, net->moving, values->at + at));
}

/* A failed step leaves params and state alone, or says that they are gone; the running mean is the
   trainer's to put back. */
static void recover(run *r, const cn_values *checkpoint) {
    cn_net *net = &r->net;
    cn_values now;
    const bool failed = net->model->run.failed;
    take_checkpoint(net, &now);
    if (failed) {
        double loss = 0.0;
        r->failures++;
        t_error(net->model, ms_step(net->model, &loss), MS_RESULT_FAILED);
        put_checkpoint(net, checkpoint);
        t_ok(net->model, ms_wrap(net->model));
        return;
    }
    assert_memory_equal(now.at, checkpoint->at, (size_t)now.count * sizeof(float));
    t_ok(net->model, ms_write(net->model, net->moving, checkpoint->at + now.count));
}

/* Steps until `target` are complete; a batch is known by step and micro-batch. */
static void run_steps(run *r, uint64_t target, const char *where) {
    cn_net *net = &r->net;
    const uint64_t micros = net->how.micro_count ? net->how.micro_count : 1;
    cn_values checkpoint;
    enter_place(r, where);
    while (net->model->run.step < target) {
        const uint64_t step = net->model->run.step, micro = net->model->run.micro;
        double loss = 0.0;
        if (micro == 0) {
            take_checkpoint(net, &checkpoint);
        }
        ms_result result = cn_feed(net, step * micros + micro);
        if (result != MS_RESULT_OK) {
            note_error(r, result);
            t_ok(net->model, cn_feed(net, step * micros + micro));
        }
        result = ms_step(net->model, step % 2 != 0 ? &loss : NULL);
        if (result != MS_RESULT_OK) {
            note_error(r, result);
        }
        if (result != MS_RESULT_OK && net->model->run.step == step) {
            assert_int_equal(net->model->run.micro, 0);
            recover(r, &checkpoint);
        }
    }
    const ms_result result = ms_synchronize(net->model);
    if (result != MS_RESULT_OK) {
        note_error(r, result);
        t_ok(net->model, ms_synchronize(net->model));
    }
}

static ms_result create_again(run *r, const cn_how *how) {
    ms_destroy(r->net.model);
    r->net.model = NULL;
    const ms_result result = cn_create(&r->net, how);
    return result == MS_RESULT_OK ? r->net.model->errors.sticky : result;
}

static ms_result make_arena(run *r, cn_how *how) {
    const ms_backend backend = cn_backend(how);
    const ms_allocator allocator = t_heap_allocator(&r->arena_heap);
    return r->of->shares ? ms_arena_create(&backend, &allocator, &how->arena) : MS_RESULT_OK;
}

static ms_result own_stream(const trial *of, cn_how *how) {
    cudaStream_t stream = NULL;
    if (!of->shares) {
        return MS_RESULT_OK;
    }
    const int error = cn_launch_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    how->stream = stream;
    return error ? MS_RESULT_BACKEND : MS_RESULT_OK;
}

static void run_script(run *r, cn_values *values) {
    cn_how how = r->of->how;
    cn_net *net = &r->net;
    const int64_t more = CN_MOST_ROWS, usual = CN_ROWS;
    RETRY(r, "stream", own_stream(r->of, &how));
    RETRY(r, "arena", make_arena(r, &how));
    RETRY(r, "create", create_again(r, &how));
    if (how.borrows) {
        RETRY(r, "lend", cn_lend(net));
    }
    RETRY(r, "wrap", ms_wrap(net->model));
    RETRY(r, "write", cn_write_params(net));
    run_steps(r, SCRIPT_STEPS, "step");
    RETRY(r, "reshape", ms_reshape(net->model, &more));
    net->rows = more;
    run_steps(r, SCRIPT_STEPS + 1, "step of another size");
    RETRY(r, "reshape back", ms_reshape(net->model, &usual));
    net->rows = usual;
    RETRY(r, "wrap again", ms_wrap(net->model));
    run_steps(r, SCRIPT_STEPS + 3, "step of the second plan");
    RETRY(r, "detach", ms_detach(net->model));
    run_steps(r, SCRIPT_STEPS + 4, "step of the plain plan");
    RETRY(r, "read", cn_read_values(net, values));
    enter_place(r, "destroy");
    cn_destroy(net);
    ms_arena_destroy(how.arena);
    if (how.stream) {
        assert_int_equal(cudaStreamDestroy((cudaStream_t)how.stream), cudaSuccess);
    }
    assert_int_equal(r->arena_heap.live_count, 0);
    enter_place(r, "end");
}

static bool is_among(const char *text, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(text, list[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* Calls of which nobody needs to know that they failed: what a report asks for, and what stands
   around the release of memory and graphs, which goes on. */
static bool may_be_silent(const char *call, const char *where) {
    static const char *const asking[] = {"cudaGetDeviceProperties", "cudaMemGetInfo",
                                         "cudaDeviceGetAttribute"};
    static const char *const releasing[] = {"cudaGetDevice", "cudaSetDevice",
                                            "cudaStreamSynchronize"};
    static const char *const places[] = {"destroy", "detach", "wrap again"};
    const bool scope = strcmp(call, "cudaGetDevice") == 0;
    return is_among(call, asking, 3) ||
           (is_among(call, releasing, 3) && is_among(where, places, 3)) ||
           (scope && (strcmp(where, "wrap") == 0 || strncmp(where, "step", 4) == 0));
}

static void run_with_fault(const trial *of, uint64_t call, run *r, cn_values *values) {
    memset(r, 0, sizeof *r);
    r->of = of;
    emulation_reset(call % 23);
    emulation_fail(call);
    run_script(r, values);
    cn_clean();
}

static void every_cuda_call_fails_once(void **state) {
    (void)state;
    const uint64_t stride = t_stride(7);
    trial trials[TRIALS];
    make_trials(trials);
    for (int i = 0; i < TRIALS; i++) {
        run r;
        cn_values expected, values;
        uint64_t call = 0, silent = 0, failures = 0, tried = 0;
        run_with_fault(&trials[i], 0, &r, &expected);
        assert_int_equal(r.errors, 0);
        do {
            call += trials[i].every * stride;
            run_with_fault(&trials[i], call, &r, &values);
            const char *failed = emulation_failed();
            tried += failed != NULL;
            if (failed && r.errors == 0) {
                silent++;
                if (!may_be_silent(failed, r.failed_where)) {
                    print_error("%s: call %u, %s in %s, failed unnoticed\n", trials[i].name,
                                (unsigned)call, failed, r.failed_where);
                    fail();
                }
            }
            if (!cn_alike(&values, &expected, 0.0)) {
                print_error("%s: wrong values behind call %u, %s\n", trials[i].name, (unsigned)call,
                            failed ? failed : "-");
                fail();
            }
            failures += r.failures;
        } while (emulation_failed() != NULL);
        print_message("%s: %u calls of %u, %u unnoticed, %u models marked as failed\n",
                      trials[i].name, (unsigned)tried, (unsigned)call - 1, (unsigned)silent,
                      (unsigned)failures);
        assert_true(call > 100);
    }
}

/* Most are made where plans are searched for: some hundred of all are failed. */
static void host_allocations_fail_once(void **state) {
    (void)state;
    const uint64_t most = t_sweep(60, 600);
    trial trials[TRIALS];
    make_trials(trials);
    for (int i = 0; i < TRIALS; i++) {
        run r;
        cn_values expected, values;
        run_with_fault(&trials[i], 0, &r, &expected);
        const uint64_t calls = r.net.heap.calls;
        const uint64_t stride = 1 + calls * trials[i].every / (3 * most);
        assert_true(calls > 50);
        for (uint64_t call = 1; call <= calls; call += stride) {
            memset(&r, 0, sizeof r);
            r.of = &trials[i];
            emulation_reset(call % 23);
            r.net.heap.fail_at = call;
            run_script(&r, &values);
            cn_clean();
            assert_true(r.net.heap.has_failed);
            assert_true(cn_alike(&values, &expected, 0.0));
        }
    }
}

/* A report measures, or stays with what the runtime states, or is an error; it leaves nothing
   behind, and the next one measures. */
static void a_report_without_measurements_leaves_nothing_behind(void **state) {
    (void)state;
    const uint64_t stride = t_stride(7);
    uint64_t call = 0, errors = 0, stated = 0;
    for (;;) {
        cn_how how;
        cn_net net;
        ms_hardware hardware;
        memset(&how, 0, sizeof how);
        memset(&net, 0, sizeof net);
        how.cuda = true;
        call += stride;
        emulation_reset(call % 23);
        emulation_device device = emulation_get_device();
        device.memory_bytes = (uint64_t)2 << 20; // products are slow there
        emulation_set_device(&device);
        assert_int_equal(cn_create(&net, &how), MS_RESULT_OK);
        emulation_fail(call);
        const ms_result result = ms_hardware_report(net.model, &hardware);
        const bool failed = emulation_failed() != NULL;
        assert_true(result == MS_RESULT_OK || result == MS_RESULT_BACKEND);
        assert_true(result == MS_RESULT_OK || !hardware.is_measured);
        assert_true(failed || hardware.is_measured);
        errors += result != MS_RESULT_OK;
        stated += result == MS_RESULT_OK && !hardware.is_measured;
        assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
        emulation_fail(0);
        t_ok(net.model, ms_hardware_report(net.model, &hardware));
        assert_true(hardware.is_measured && hardware.memory_gb_per_s > 0.0);
        cn_destroy(&net);
        cn_clean();
        if (!failed) {
            break;
        }
    }
    print_message("%u calls, %u of them an error, %u not measured\n", (unsigned)call,
                  (unsigned)errors, (unsigned)stated);
    assert_true(errors > 10 && stated * stride > 5);
}

// ------------------------------------------------------------------------------------------------
// what is not there

static void a_lack_of_device_memory_is_told(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    memset(&how, 0, sizeof how);
    memset(&net, 0, sizeof net);
    how.cuda = true;
    emulation_reset(1);
    emulation_device device = emulation_get_device();
    device.memory_bytes = (uint64_t)8 << 20;
    device.used_bytes = device.memory_bytes - 4096;
    emulation_set_device(&device);
    assert_int_equal(cn_create(&net, &how), MS_RESULT_OK);
    for (int i = 0; i < 2; i++) {
        t_error(net.model, ms_wrap(net.model), MS_RESULT_OUT_OF_MEMORY);
        t_text_has(ms_last_error(net.model), "backend cuda has no ");
        t_text_has(ms_last_error(net.model), " KiB for the arena");
        t_text_has(ms_last_error(net.model), "4.00 KiB of 8.00 MiB are free");
        t_text_has(ms_last_error(net.model), "ms_set_budget");
        assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    }
    device.used_bytes = 0;
    emulation_set_device(&device);
    t_ok(net.model, ms_wrap(net.model));
    t_ok(net.model, cn_write_params(&net));
    cn_steps(&net, 0, 3);
    const cn_values before = cn_get_values(&net);
    device.used_bytes = device.memory_bytes; // no room for a second arena, and no need of one
    emulation_set_device(&device);
    t_ok(net.model, ms_detach(net.model));
    const cn_values after = cn_get_values(&net);
    assert_true(cn_alike(&after, &before, 0.0));
    cn_steps(&net, 3, 3);
    uint64_t smallest;
    const cn_values trained = cn_get_values(&net);
    t_ok(net.model, ms_smallest_budget(net.model, &smallest));
    ms_set_budget(net.model, smallest); // a smaller one takes its place, by way of the host
    const ms_result result = ms_wrap(net.model);
    if (result != MS_RESULT_OK) { // what was given back went to others
        t_error(net.model, result, MS_RESULT_OUT_OF_MEMORY);
        t_error(net.model, ms_step(net.model, NULL), MS_RESULT_ORDER);
        device.used_bytes = 0;
        emulation_set_device(&device);
        t_ok(net.model, ms_wrap(net.model));
    }
    const cn_values resumed = cn_get_values(&net);
    assert_true(cn_alike(&resumed, &trained, 0.0));
    cn_steps(&net, 6, 3);
    cn_destroy(&net);
    cn_clean();
}

/* A budget of 0 takes what is free. */
static void a_budget_of_0_takes_what_is_free(void **state) {
    (void)state;
    ms_config config;
    ms_memory_report report;
    cn_net net;
    cn_how how;
    memset(&how, 0, sizeof how);
    memset(&net, 0, sizeof net);
    memset(&report, 0, sizeof report);
    how.cuda = true;
    emulation_reset(1);
    emulation_device device = emulation_get_device();
    device.memory_bytes = (uint64_t)64 << 20;
    device.used_bytes = (uint64_t)24 << 20;
    emulation_set_device(&device);
    net.how = how;
    net.rows = CN_ROWS;
    config = cn_config(&net, &how);
    config.memory_budget_bytes = 0;
    config.target_utilization = 0.5;
    assert_int_equal(ms_create(&config, &net.model), MS_RESULT_OK);
    cn_inputs(&net);
    cn_layers(&net);
    t_ok(net.model, ms_wrap(net.model));
    t_ok(net.model, ms_report(net.model, &report));
    assert_int_equal(report.budget_bytes, (uint64_t)20 << 20);
    assert_true(report.arena_bytes <= report.budget_bytes);
    assert_int_equal(emulation_count().device_bytes, report.arena_bytes);
    cn_destroy(&net);
    cn_clean();
}

static void keep_text(ms_log_level level, const char *tag, const char *text, void *user) {
    (void)tag;
    if (level == MS_LOG_ERROR) {
        snprintf((char *)user, 512, "%s", text);
    }
}

static void check_no_device(int device, const char *part) {
    ms_config config;
    ms_model *model = NULL;
    char text[512] = "";
    memset(&config, 0, sizeof config);
    config.backend = ms_backend_cuda(device);
    config.log = keep_text;
    config.log_user = text;
    const ms_result result = ms_create(&config, &model);
    assert_true(result != MS_RESULT_OK && model != NULL);
    t_text_has(ms_last_error(model), part);
    t_not_created(&model, result);
    t_text_has(text, part);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
}

static void devices_that_are_not_there_are_named(void **state) {
    (void)state;
    emulation_reset(1);
    check_no_device(1, cudaGetErrorString(cudaErrorInvalidDevice));
    check_no_device(-1, cudaGetErrorString(cudaErrorInvalidDevice));
    emulation_device none = emulation_get_device();
    none.count = 0;
    emulation_set_device(&none);
    check_no_device(0, cudaGetErrorString(cudaErrorNoDevice));
    emulation_reset(1);
    cn_clean();
}

// ------------------------------------------------------------------------------------------------
// nets that catch fish

/* The backend with one of its calls of a step left out: number `index` of that kind since the step
   began, its batch included. */
typedef enum order_call { ORDER_RECORD, ORDER_WAIT, ORDER_WAIT_ON_HOST, ORDER_CALLS } order_call;

/* Calls of a kind with a stream and an event (those of staged inputs and of a program's copies are one), and how many of them
   were missed. */
typedef struct order_class {
    uint32_t calls, missed;
} order_class;

typedef struct leak {
    ms_backend real;
    order_call kind;
    bool is_on;
    uint32_t index, count[ORDER_CALLS];
    int stream, event; // of the call that was left out
    order_class classes[ORDER_CALLS][MS_STREAM_COUNT + 1][MSI_EVENT_COUNT + 1];
} leak;

enum { LEAKY_STEPS = 6 };

static leak hole;

static const char *const order_names[] = {"record", "wait", "wait_on_host"};
static const char *const stream_names[] = {"compute", "to device", "to host", "host"};

static const char *event_name(int event) {
    return event == MSI_EVENT_COMPUTE   ? "the work before"
           : event == MSI_EVENT_COPY    ? "a copy"
           : event == MSI_EVENT_VERDICT ? "the verdict"
           : event == MSI_EVENT_COUNT   ? "an input or a copy"
                                        : "others";
}

static bool is_left_out(order_call kind, ms_stream_kind stream, uint32_t event) {
    if (!hole.is_on || hole.count[kind]++ != hole.index || kind != hole.kind) {
        return false;
    }
    hole.stream = (int)stream;
    hole.event = (int)(event < MSI_EVENT_COUNT ? event : (uint32_t)MSI_EVENT_COUNT);
    return true;
}

static int leaky_record(void *state, ms_stream_kind stream, uint32_t event) {
    return is_left_out(ORDER_RECORD, stream, event) ? 0 : hole.real.record(state, stream, event);
}

static int leaky_wait(void *state, ms_stream_kind stream, uint32_t event) {
    return is_left_out(ORDER_WAIT, stream, event) ? 0 : hole.real.wait(state, stream, event);
}

static int leaky_wait_on_host(void *state, uint32_t event) {
    return is_left_out(ORDER_WAIT_ON_HOST, MS_STREAM_COUNT, event)
               ? 0
               : hole.real.wait_on_host(state, event);
}

/* Trains with the hole; false: the numbers or the losses are wrong, or there was an error. */
static bool train_leaky(const cn_how *how, bool with_loss, const cn_values *expected,
                        const double *losses, double *found) {
    cn_net net;
    bool good = true;
    cn_start(&net, how);
    hole.is_on = true;
    for (uint64_t i = 0; i < LEAKY_STEPS && good; i++) {
        memset(hole.count, 0, sizeof hole.count);
        good = cn_step(&net, i, with_loss ? &found[i] : NULL) == MS_RESULT_OK;
        good &= !losses || found[i] == losses[i];
    }
    hole.is_on = false;
    good &= ms_synchronize(net.model) == MS_RESULT_OK;
    const cn_values values = cn_get_values(&net);
    good &= !expected || cn_alike(&values, expected, 0.0);
    cn_destroy(&net);
    return good;
}

/* Leaves out each call of a step in turn, in all steps. */
static void leave_out(const cn_how *how, bool with_loss, order_call kind, uint64_t seeds) {
    double losses[LEAKY_STEPS], found[LEAKY_STEPS];
    memset(losses, 0, sizeof losses);
    emulation_reset(0);
    const cn_values expected = cn_trained(how, LEAKY_STEPS);
    hole.index = UINT32_MAX;
    assert_true(train_leaky(how, with_loss, NULL, NULL, losses));
    const uint32_t count = hole.count[kind];
    hole.kind = kind;
    for (hole.index = 0; hole.index < count; hole.index++) {
        bool caught = false;
        for (uint64_t seed = 1; seed <= seeds && !caught; seed++) {
            memset(found, 0, sizeof found);
            emulation_reset(seed);
            caught = !train_leaky(how, with_loss, &expected, losses, found);
        }
        order_class *c = &hole.classes[kind][hole.stream][hole.event];
        c->calls++;
        c->missed += caught;
    }
}

static void report_orders(void) {
    for (int kind = 0; kind < ORDER_CALLS; kind++) {
        for (int stream = 0; stream <= MS_STREAM_COUNT; stream++) {
            for (int event = 0; event <= MSI_EVENT_COUNT; event++) {
                const order_class *c = &hole.classes[kind][stream][event];
                if (c->calls > 0) {
                    const bool is_spare = kind == ORDER_WAIT && event == MSI_EVENT_VERDICT;
                    assert_true(c->missed > 0 || is_spare);
                    print_message("%s, %s, event of %s: %u of %u missed\n", order_names[kind],
                                  stream_names[stream], event_name(event), (unsigned)c->missed,
                                  (unsigned)c->calls);
                }
            }
        }
    }
}

/* Of each class there are calls without which training goes wrong. Others order what their
   neighbours order too, for copies in one direction keep their order: of several inputs the first
   waits for the step before, and for the last the step waits. A verdict that is copied too late is
   a newer one. */
static void every_class_of_waits_matters(void **state) {
    (void)state;
    const uint64_t seeds = cn_seeds(20) < 8 ? 8 : cn_seeds(20);
    memset(&hole, 0, sizeof hole);
    hole.real = ms_backend_cuda(0);
    ms_backend backend = hole.real;
    backend.record = leaky_record;
    backend.wait = leaky_wait;
    backend.wait_on_host = leaky_wait_on_host;
    for (int i = 0; i < 6; i++) {
        cn_how how;
        memset(&how, 0, sizeof how);
        how.cuda = true;
        how.backend = &backend;
        how.clip = i % 3 == 1 ? 0.05f : 0.0f;
        how.micro_count = i % 3 == 2 ? 2 : 0;
        for (int kind = 0; kind < ORDER_CALLS; kind++) {
            leave_out(&how, i >= 3, (order_call)kind, seeds);
        }
    }
    report_orders();
}

static void read_device_memory(void *user) {
    const volatile float *data = (const volatile float *)user;
    (void)data[0];
}

static void the_host_cannot_read_device_memory(void **state) {
    (void)state;
    cn_how how;
    cn_net net;
    char text[256] = "";
    memset(&how, 0, sizeof how);
    how.cuda = true;
    cn_reset(1);
    cn_start(&net, &how);
    cn_steps(&net, 0, 2);
    t_ok(net.model, ms_synchronize(net.model));
    void *device = ms_data(net.model, net.param[0]);
    assert_non_null(device);
    assert_true(emulation_catch(read_device_memory, device, text, sizeof text));
    print_message("%s\n", text);
    cn_reset(1); // what the model held is gone
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_cuda_call_fails_once),
        cmocka_unit_test(host_allocations_fail_once),
        cmocka_unit_test(a_report_without_measurements_leaves_nothing_behind),
        cmocka_unit_test(a_lack_of_device_memory_is_told),
        cmocka_unit_test(a_budget_of_0_takes_what_is_free),
        cmocka_unit_test(devices_that_are_not_there_are_named),
        cmocka_unit_test(every_class_of_waits_matters),
        cmocka_unit_test(the_host_cannot_read_device_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

static void faults_need_the_emulation(void **state) {
    (void)state;
    CN_SKIP_ON_GPU();
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(faults_need_the_emulation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
