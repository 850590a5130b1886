/*  test_waits.c - waits of the host for a device that waits for other ranks by itself, one of which ends,
    or is slow: a comm of this test on the virtual device, whose other rank is a copy of this one; and,
    compiled for it, NCCL on the emulated GPU. */
#include "private.h"
#include "toy_layers.h"
#include "random_dag.h"
#include "virtual.h"
#include "late_dag.h"
#include "threads_comm.h"

static bool train(rd_net *n, uint32_t first, uint32_t count, bool waits, ms_result *result) {
    double loss = 0.0;
    for (uint32_t step = first; step < first + count; ++step) {
        n->run.step = step;
        for (uint32_t i = 0; i < n->run.graph->layer_count; ++i) {
            n->run.op[i].forwards = n->run.op[i].backwards = n->run.op[i].recomputes = 0;
        }
        *result = ms_step(n->model, waits ? &loss : NULL);
        if (*result != MS_RESULT_OK) {
            return false;
        }
    }
    return true;
}

/* Many layers, all of which can run late, and one micro-batch. They expect one step at a time. */
static bool is_fit(const rd_graph *g) {
    bool is = g->accumulation == 1 && g->optimizer.kind != MS_OPTIMIZER_NONE && g->layer_count > 9;
    for (uint32_t i = 0; i < g->value_count && is; ++i) {
        const rd_value *v = &g->value[i];
        is = !v->on_host && !v->borrowed && !v->borrowed_gradient && !v->borrowed_state;
    }
    return is;
}

static rd_graph *make_graph(uint64_t seed, v_layer *layers) {
    rd_graph *g = ld_make_late(rd_generate(seed), layers);
    for (; !is_fit(g); seed += 1000) {
        free(g);
        g = ld_make_late(rd_generate(seed + 1000), layers);
    }
    return g;
}

#ifndef T_CUDA

// ------------------------------------------------------------------------------------------------
// a comm whose other ranks do the same as this one

enum { RANKS = 3, NOT_YET = 5, ERROR_OF_COMM = 77 };

static struct {
    double us; // a clock that goes on by a second with each question
    double ended_us;
    ms_model *model;
    uint32_t asked[2]; // how often: whether a mark has come, or anything else
    uint32_t calls, aborts, late_calls;
    uint32_t endless; // waits that would have no end
    uint32_t ends_at; // the number of the collective that the others do not come to
    int error;        // that the comm finds
    bool ends;
    bool wraps; // the ranks agree on a plan
} other;

static double clock_of_questions(void) {
    return other.us;
}

typedef struct part {
    const char *send;
    char *receive;
    size_t bytes;
    uint32_t count;
} part;

static void run_part(void *user, void *argument) {
    const part *p = (const part *)argument;
    (void)user;
    for (uint32_t r = 0; r < p->count; ++r) { // one of them may be what is sent
        memmove(p->receive + r * p->bytes, p->send, p->bytes);
        if (other.wraps && p->count == RANKS && p->bytes == sizeof(msi_of_rank)) {
            const uint64_t number = r;
            memcpy(p->receive + r * p->bytes + offsetof(msi_of_rank, rank), &number, sizeof number);
        }
    }
}

static int enqueue(const ms_collective *c, uint64_t first, uint32_t count) {
    const v_stream *stream = (const v_stream *)c->stream;
    part p;
    other.late_calls += other.aborts;
    other.ended_us = ++other.calls == other.ends_at ? other.us : other.ended_us;
    other.ends = other.calls == other.ends_at || other.ends;
    p.bytes = (size_t)c->count * ms_dtype_bytes(c->dtype);
    p.send = (const char *)c->send + first * p.bytes;
    p.receive = (char *)c->receive;
    p.count = count;
    return streams_enqueue(&stream->device->engine, stream->queue, run_part, NULL, &p, sizeof p, 10)
               ? 0
               : 1;
}

static int all_reduce(void *user, const ms_collective *c) {
    (void)user;
    return enqueue(c, 0, 1);
}

static int reduce_scatter(void *user, const ms_collective *c) {
    (void)user;
    return enqueue(c, 1, 1);
}

static int all_gather(void *user, const ms_collective *c) {
    (void)user;
    return enqueue(c, 0, RANKS);
}

static int check(void *user) {
    (void)user;
    other.late_calls += other.aborts;
    return other.ends ? other.error : 0;
}

static void end(void *user) {
    (void)user;
    other.aborts += 1;
}

static const char *text_of(void *user, int error) {
    (void)user;
    return error == ERROR_OF_COMM ? "a cable is out" : NULL;
}

/* An event comes after a few questions; one that is no mark, after all marks; none if a rank has
   ended. */
static int slow_query(void *state, uint32_t event, bool *has_come) {
    const msi_ranks *r = &other.model->ranks;
    const bool is_mark = event >= MSI_EVENT_MARKS && event < MSI_EVENT_COUNT;
    other.us += 1e6;
    *has_come = !other.ends && (is_mark || r->mark_count == 0) && ++other.asked[!is_mark] > NOT_YET;
    other.asked[!is_mark] = *has_come ? 0 : other.asked[!is_mark];
    return *has_come ? v_wait_on_host(state, event) : 0;
}

static int wait_for_event(void *state, uint32_t event) {
    other.endless += other.ends && other.aborts == 0;
    return v_wait_on_host(state, event);
}

static int wait_for_all(void *state) {
    other.endless += other.ends && other.aborts == 0;
    return v_synchronize(state);
}

static ms_result wrap(ms_model *model) {
    other.wraps = true;
    const ms_result result = ms_wrap(model);
    other.wraps = false;
    return result;
}

static void begin(rd_graph *g, v_device *device, rd_net **n, char *failure) {
    ms_config config = t_config();
    memset(&other, 0, sizeof other);
    v_open(device, g->seed);
    config.backend = v_backend(device);
    config.backend.query = slow_query;
    config.backend.wait_on_host = wait_for_event;
    config.backend.synchronize = wait_for_all;
    config.comm.size = sizeof config.comm;
    config.comm.name = "copies";
    config.comm.rank = 1;
    config.comm.count = RANKS;
    config.comm.on_device = true;
    config.comm.all_reduce = all_reduce;
    config.comm.reduce_scatter = reduce_scatter;
    config.comm.all_gather = all_gather;
    config.comm.broadcast = config.comm.barrier = all_reduce;
    config.comm.check = check;
    config.comm.abort = end;
    config.comm.error_text = text_of;
    config.comm_timeout = 4.0 * NOT_YET;
    *n = rd_net_create(g, &config, "waits", failure, false);
    other.model = (*n)->model;
    t_hook.platform_us = clock_of_questions;
    t_ok((*n)->model, wrap((*n)->model));
    assert_true(rd_net_write(*n, 0, false));
}

static void finish(rd_graph *g, v_device *device, rd_net *n) {
    rd_net_destroy(n);
    assert_int_equal(device->engine.pending, 0);
    assert_int_equal(other.late_calls, 0);
    assert_int_equal(other.endless, 0);
    v_close(device);
    free(g);
}

/* All that is waited for takes far longer than comm_timeout, but one mark after the other comes. */
static void a_device_with_much_to_do_is_waited_for(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    uint32_t rooms = 0;
    for (uint64_t seed = 1; seed <= 10; ++seed) {
        v_device device;
        rd_net *n;
        char failure[RD_TEXT] = "";
        ms_result result;
        rd_graph *g = make_graph(seed, layers);
        begin(g, &device, &n, failure);
        const double begin_us = other.us;
        assert_true(train(n, 0, 1, false, &result));
        assert_true(n->model->ranks.mark_count <= MSI_MOST_MARKS);
        assert_true(n->model->ranks.mark_count > 4);
        const double now_us = other.us;
        rooms += now_us > begin_us;
        t_ok(n->model, ms_synchronize(n->model));
        assert_true(other.us - now_us > 1e6 * 4 * NOT_YET);
        assert_int_equal(n->model->ranks.mark_count, 0);
        assert_int_equal(other.aborts, 0);
        finish(g, &device, n);
    }
    assert_true(rooms > 5); // waits for room for marks
}

/* Where a rank is missed: in any of the waits that a trainer comes to. */
static ms_result come_to(rd_net *n, int wait) {
    ms_result result = MS_RESULT_OK;
    uint64_t data[RD_ELEMENTS];
    uint32_t input = 0;
    switch (wait) {
    case 0:
        (void)train(n, 0, 1, true, &result);
        break;
    case 1: // room for marks, or the wait at the end
        result = train(n, 0, 1, false, &result) ? ms_synchronize(n->model) : result;
        break;
    case 2: // a copy to the host
        if (train(n, 0, 1, false, &result)) {
            while (n->run.graph->value[input].role != RD_PARAM) {
                ++input;
            }
            result = ms_read(n->model, n->handle[input], data);
        }
        break;
    case 3:
        result = MS_RESULT_MORE;
        for (int k = 0; k < 100000 && result == MS_RESULT_MORE; ++k) {
            double loss;
            result = ms_step_slice(n->model, 1000, &loss);
        }
        break;
    default:
        result = ms_eval(n->model, NULL);
        result = result == MS_RESULT_OK ? wrap(n->model) : result;
        result = result == MS_RESULT_OK ? ms_synchronize(n->model) : result;
    }
    return result;
}

static void a_rank_that_ends_ends_all_waits(void **state) {
    (void)state;
    static v_layer layers[RD_LAYERS];
    uint32_t found = 0;
    for (uint64_t seed = 1; seed <= 5; ++seed) {
        for (int wait = 0; wait < 5; ++wait) {
            for (uint32_t call = 1; call < 10; call += 1 + (uint32_t)seed % 3) {
                v_device device;
                rd_net *n;
                char failure[RD_TEXT] = "";
                rd_graph *g = make_graph(seed, layers);
                begin(g, &device, &n, failure);
                n->run.debug = true; // layers may be called twice
                other.ends_at = other.calls + call;
                other.error = call % 2 ? ERROR_OF_COMM : 0;
                const ms_result result = come_to(n, wait);
                if (other.ends) {
                    found++;
                    assert_int_equal(result, MS_RESULT_RANKS);
                    assert_int_equal(other.aborts, 1);
                    t_text_has(ms_last_error(n->model),
                               call % 2 ? "77: a cable is out" : "not ended");
                    t_text_has(ms_last_error(n->model), "rank 1 of 3");
                    assert_true(other.us - other.ended_us < (call % 2 ? 4e6 : 1e6 * 6 * NOT_YET));
                    assert_int_equal(ms_step(n->model, NULL), MS_RESULT_RANKS);
                } else {
                    assert_int_equal(result, MS_RESULT_OK);
                }
                finish(g, &device, n);
            }
        }
    }
    assert_true(found > 60);
    print_message("%u waits ended\n", (unsigned)found);
}

#endif

// ------------------------------------------------------------------------------------------------
// NCCL

#ifdef CUDART_EMULATION

enum { NCCL_RANKS = 3 };

typedef struct nccl_run {
    tc_world world;
    uint64_t seed;
    int wait;
    ms_result results[NCCL_RANKS];
    char texts[NCCL_RANKS][MSI_ERROR_BYTES];
    char failure[NCCL_RANKS][RD_TEXT];
    uint64_t left[NCCL_RANKS];
} nccl_run;

/* The last rank ends after a step, as a process does that is killed. */
static void *lose_rank(uint32_t rank, void *argument) {
    nccl_run *r = (nccl_run *)argument;
    ms_config config = t_config();
    ms_nccl_id id;
    ms_result result = MS_RESULT_OK;
    double loss = 0.0;
    static v_layer layers[RD_LAYERS];
    rd_graph *g = make_graph(r->seed, layers);
    ld_make_later(g, layers);
    config.comm = r->world.ranks[rank].comm;
    if (ms_nccl_share_id(&config.comm, &id) != MS_RESULT_OK ||
        ms_comm_nccl(&id, rank, NCCL_RANKS, &config.comm) != MS_RESULT_OK) {
        return r;
    }
    config.comm_timeout = 0.4;
    rd_net *n = rd_net_create(g, &config, "nccl", r->failure[rank], false);
    n->run.debug = true;
    result = ms_wrap(n->model);
    if (result == MS_RESULT_OK && rd_net_write(n, 0, false)) {
        (void)train(n, 0, 1, true, &result);
    }
    if (rank == NCCL_RANKS - 1 || result != MS_RESULT_OK) {
        _exit(result != MS_RESULT_OK);
    }
    if (r->wait == 0) {
        (void)train(n, 1, 1, true, &result);
    } else if (r->wait == 1) {
        result = train(n, 1, 1, false, &result) ? ms_synchronize(n->model) : result;
    } else {
        result = ms_eval(n->model, &loss);
    }
    r->results[rank] = result;
    snprintf(r->texts[rank], sizeof r->texts[rank], "%s", ms_last_error(n->model));
    rd_net_destroy(n);
    ms_comm_close(&config.comm);
    const emulation_counts left = emulation_count();
    r->left[rank] = left.device_allocations + left.pinned_allocations + left.streams + left.events;
    free(g);
    return NULL;
}

static void a_process_that_ends_ends_all_waits(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
        for (int wait = 0; wait < 3; ++wait) {
            nccl_run *r = (nccl_run *)meeting_shared(sizeof *r);
            r->seed = seed;
            r->wait = wait;
            tc_open(&r->world, NCCL_RANKS);
            assert_true(tc_run(&r->world, lose_rank, r));
            for (uint32_t k = 0; k < NCCL_RANKS - 1; ++k) {
                assert_int_equal(r->results[k], MS_RESULT_RANKS);
                t_text_has(r->texts[k], "of comm NCCL has not ended");
                assert_int_equal(r->left[k], 0);
            }
            tc_close(&r->world);
            munmap(r, sizeof *r);
        }
    }
}

#endif

int main(void) {
    const struct CMUnitTest tests[] = {
#ifndef T_CUDA
        cmocka_unit_test(a_device_with_much_to_do_is_waited_for),
        cmocka_unit_test(a_rank_that_ends_ends_all_waits),
#endif
#ifdef CUDART_EMULATION
        cmocka_unit_test(a_process_that_ends_ends_all_waits),
#endif
    };
    return cmocka_run_group_tests_name("waits", tests, NULL, NULL);
}
