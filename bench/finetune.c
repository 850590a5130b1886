// What it costs to fine-tune a published model of the family of Llama inside a byte budget: the same
// windows of the same tokens, with the same AdamW, as bench/finetune_pytorch.py, whose `decode` and
// `tokens` write what this reads. It prints the loss of each step, the held-out loss before and after,
// the time of a step, and the most memory that the process, and a GPU, has had.
//
//     build/bench/finetune --from DIR --train DIR/train.bin --held-out DIR/ids.bin --budget half
//
// A window is --sequence ids and, as the last target, the id that follows; the next window begins
// there. A step takes --batch windows, each once, in order. The rate is constant; matrices decay,
// vectors do not.
//
// With --rank adapters are trained alone. --base has the matrices beside them in blocks of codes, as
// examples/llama does; with --decoded they are F32 with the values of these blocks, so that the two runs
// differ by arithmetic alone.
#include "bench.h"

#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "trainer.h"

#include "weights.h"
#include "weights_config.h"

enum { WARM_STEPS = 2, HEAD_ROWS = 64 };

/* Tokens of a file: int32, in the order of bytes of this machine. */
typedef struct id_file {
    int32_t *ids;
    int64_t count, batches; // of windows
} id_file;

typedef struct finetune {
    trainer t;
    const char *from, *train_path, *held_out_path, *base, *write, *write_type;
    float rate;
    int64_t rank;
    bool decodes;
    blocks_kind blocks; // of the base
    nn_llama_config config;
    weights_output out;
    weight_file file; // of --from; closed once it is read
    bool has_file;
    weights_layout layout;
    id_file train, held_out;
    double *seconds; // of each step
    uint64_t before_bytes, loading_bytes, peak_bytes;
    bool peak_is_of_steps;
} finetune;

// ---- tokens -------------------------------------------------------------------------------------

static int check_ids(const finetune *f, const char *path, id_file *file) {
    const int64_t tokens = f->config.batch * f->config.sequence;
    file->batches = (file->count - 1) / tokens;
    if (file->batches < 1) {
        return fail("%s has %lld ids; a batch of %lld needs one more", path, (long long)file->count,
                    (long long)tokens);
    }
    for (int64_t i = 0; i < file->count; i++) {
        if (file->ids[i] < 0 || file->ids[i] >= f->config.vocabulary) {
            return fail("%s: id %lld is %ld, and the model has %lld tokens; ids are int32", path,
                        (long long)i, (long)file->ids[i], (long long)f->config.vocabulary);
        }
    }
    return 0;
}

static int read_ids(finetune *f, const char *path, id_file *file) {
    weight_bytes bytes;
    memset(&bytes, 0, sizeof bytes);
    const bool is_read = weight_slurp(&f->file, path, &bytes);
    file->ids = (int32_t *)(void *)bytes.data;
    file->count = (int64_t)(bytes.size / sizeof *file->ids);
    return is_read ? check_ids(f, path, file) : fail("%s", f->file.error);
}

static int write_batch(finetune *f, const id_file *file, int64_t number) {
    const trainer *t = &f->t;
    const int32_t *ids = file->ids + number * f->config.batch * f->config.sequence;
    return ms_write(t->model, t->built.tokens, ids) == MS_RESULT_OK &&
                   ms_write(t->model, t->built.targets, ids + 1) == MS_RESULT_OK
               ? 0
               : fail("%s", ms_last_error(t->model));
}

// ---- the model ----------------------------------------------------------------------------------

static int choose_model(trainer *t) {
    finetune *f = (finetune *)t; // its first member
    f->has_file = true;
    if (!weight_open(&f->file, f->from) || !weights_config(&f->file, f->from, &f->config) ||
        !weights_read_ends(&f->file, f->from, &f->out) ||
        !weights_find_family(&f->file, &f->layout.family)) {
        return fail("--from %s: %s", f->from, f->file.error);
    }
    if (f->config.positions > 0 && t->options.sequence > f->config.positions) {
        return fail("--sequence %lld: the model is for up to %lld tokens",
                    (long long)t->options.sequence, (long long)f->config.positions);
    }
    f->layout = weights_layout_of(&f->config, f->layout.family);
    f->config.adapter_rank = f->rank;
    f->config.base = f->decodes ? BLOCKS_NONE : f->blocks;
    f->config.head_rows = f->blocks != BLOCKS_NONE ? HEAD_ROWS : 0; // alike in both runs
    f->config.batch = t->shape.batch = t->options.batch;
    f->config.sequence = t->shape.sequence = t->options.sequence;
    t->shape.vocabulary = f->config.vocabulary;
    t->shape.layers = f->config.layers;
    t->shape.heads = f->config.heads;
    t->shape.channels = f->config.channels;
    t->model_name = f->from;
    return 0;
}

static nn_transformer build_model(trainer *t) {
    return nn_llama(t->net, &((finetune *)t)->config);
}

static bool keeps_no_logits(const trainer *t) {
    (void)t;
    return false;
}

/* Matrices that the file has in other blocks, or in none, get the values of blocks. */
static int round_to_blocks(finetune *f, const nn_param_info *param, float *values,
                           uint8_t *blocks) {
    const int64_t count = (int64_t)ms_shape_count(&param->shape);
    if (nn_read_param(f->t.model, param, values) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(f->t.model));
    }
    blocks_encode(f->blocks, values, count, blocks);
    blocks_decode(f->blocks, blocks, count, values);
    return nn_write_param(f->t.model, param, values) == MS_RESULT_OK
               ? 0
               : fail("%s", ms_last_error(f->t.model));
}

static int round_matrices(finetune *f) {
    weights_list list;
    int64_t elements = 0;
    float *values = NULL;
    int result = 0;
    if (!weights_find_all(&f->file, f->t.net, &f->layout, &list) ||
        !(values = weights_buffers(f->file.error, f->t.net, &elements))) {
        result = fail("%s", f->file.error);
    }
    const nn_param_info *last = NULL;
    for (int64_t i = 0; i < list.count && result == 0; i++) {
        const weights_piece *p = &list.items[i];
        if (p->param->shape.rank > 1 && p->param != last &&
            weights_blocks_of(p->entry->type) != f->blocks) {
            result = round_to_blocks(f, p->param, values, (uint8_t *)(values + elements));
            last = p->param;
        }
    }
    free(values);
    free(list.items);
    return result;
}

/* A file that is not needed any more is closed: its pages count as resident. */
static int read_weights(trainer *t) {
    finetune *f = (finetune *)t;
    if (f->rank > 0 && nn_init_adapters(t->net, 1) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    const bool is_read = weights_read(t->model, t->net, &f->file, &f->layout);
    if (!is_read) {
        return fail("--from %s: %s", f->from, f->file.error);
    }
    if (f->decodes && round_matrices(f) != 0) {
        return 1;
    }
    weight_close(&f->file);
    f->has_file = false;
    return 0;
}

static const trainer_own finetune_own = {
    NULL, NULL, choose_model, build_model, keeps_no_logits, NULL, read_weights, NULL};

static const trainer_kind finetune_kind = {
    "the family of Llama", "", "", 0, 0.95f, NULL, NULL, NULL, &finetune_own};

// ---- training -----------------------------------------------------------------------------------

static int evaluate_batches(finetune *f, double *mean) {
    const int64_t batches = f->held_out.batches;
    *mean = 0.0;
    for (int64_t i = 0; i < batches; i++) {
        double loss;
        if (write_batch(f, &f->held_out, i) != 0) {
            return 1;
        }
        if (ms_eval(f->t.model, &loss) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(f->t.model));
        }
        *mean += loss / (double)batches;
    }
    return 0;
}

static int train_batches(finetune *f) {
    bench_table table = bench_table_begin(false, "step loss seconds");
    ms_set_learning_rate(f->t.model, f->rate);
    for (int64_t i = 0; i < f->t.options.steps; i++) {
        double loss;
        const double started = bench_seconds();
        if (write_batch(f, &f->train, i) != 0) {
            return 1;
        }
        if (ms_step(f->t.model, &loss) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(f->t.model));
        }
        f->seconds[i] = bench_seconds() - started;
        bench_count(&table, (uint64_t)i + 1);
        bench_value(&table, loss, 6);
        bench_value(&table, f->seconds[i], 3);
    }
    return 0;
}

static void print_results(finetune *f, double before, double after) {
    const int64_t steps = f->t.options.steps, warm = steps > WARM_STEPS ? WARM_STEPS : 0;
    const int timed = (int)(steps - warm);
    double *seconds = f->seconds + warm;
    const double median = bench_median(seconds, timed); // which sorts them
    printf("\nheld out  loss %.7f, then %.7f, over %lld tokens\n", before, after,
           (long long)(f->held_out.batches * f->config.batch * f->config.sequence));
    printf("a step    %.3f s, %.3f to %.3f: median, least and most of %d steps, after %d others\n",
           median, seconds[0], seconds[timed - 1], timed, (int)warm);
    printf("resident  %9.1f MiB at most (VmHWM) %s\n", mebibytes(f->peak_bytes),
           f->peak_is_of_steps ? "in the steps: set back after loading and the first evaluation"
                               : "with loading: /proc/self/clear_refs cannot be written");
    printf("          %9.1f MiB at most while loading, %.1f MiB before the model\n",
           mebibytes(f->loading_bytes), mebibytes(f->before_bytes));
}

/* Sets VmHWM back to what is resident now. */
static bool forget_peak(void) {
    FILE *file = fopen("/proc/self/clear_refs", "w");
    const bool is_written = file && fputs("5", file) >= 0;
    return file && fclose(file) == 0 && is_written;
}

static int run_steps(finetune *f) {
    double before, after;
    if (evaluate_batches(f, &before) != 0) {
        return 1;
    }
    f->loading_bytes = bench_status_bytes("VmHWM");
    f->peak_is_of_steps = forget_peak();
    if (train_batches(f) != 0) {
        return 1;
    }
    f->peak_bytes = bench_status_bytes("VmHWM");
    if (evaluate_batches(f, &after) != 0) {
        return 1;
    }
    print_results(f, before, after);
    return print_device_memory(&f->t);
}

static int write_folder(finetune *f) {
    if (!weights_write_folder(f->t.model, f->t.net, &f->layout, &f->config, f->write, &f->out)) {
        return fail("--write %s: %s", f->write, f->out.error);
    }
    printf("written   %s/model.safetensors and config.json, in %s\n", f->write, f->out.type);
    return 0;
}

// ---- main ---------------------------------------------------------------------------------------

static int prepare(finetune *f) {
    trainer *t = &f->t;
    t->kind = &finetune_kind;
    if (!f->from) {
        return fail("--from names the weights to begin with");
    }
    if (f->base && !blocks_find(f->base, &f->blocks)) {
        return fail("--base %s: there are q8_0, q4_1 and nf4", f->base);
    }
    if ((f->base && f->rank == 0) || (f->decodes && !f->base)) {
        return fail("--base needs --rank, and --decoded needs --base");
    }
    if (f->write_type && !f->write) {
        return fail("--write-type needs --write FOLDER");
    }
    if (f->write && !weights_choose_type(&f->out, f->write_type ? f->write_type : "f32")) {
        return fail("--write-type: %s", f->out.error);
    }
    if (f->write && !t->options.dry && !weights_check_folder(&f->out, f->write)) {
        return fail("--write %s: %s", f->write, f->out.error);
    }
    if (check_options(t) != 0) {
        return 1;
    }
    if (t->options.dry) {
        return 0;
    }
    if (!f->train_path || !f->held_out_path) {
        return fail("--train and --held-out name files of tokens, which --dry does without");
    }
    if (read_ids(f, f->train_path, &f->train) != 0 ||
        read_ids(f, f->held_out_path, &f->held_out) != 0) {
        return 1;
    }
    t->options.steps = t->options.steps ? t->options.steps : f->train.batches;
    if (t->options.steps > f->train.batches) {
        return fail("--steps %lld: %s has %lld batches of %lld x %lld", (long long)t->options.steps,
                    f->train_path, (long long)f->train.batches, (long long)f->config.batch,
                    (long long)f->config.sequence);
    }
    f->seconds = (double *)malloc((size_t)t->options.steps * sizeof *f->seconds);
    return f->seconds ? 0 : fail("no memory for %lld steps", (long long)t->options.steps);
}

static int run_finetune(finetune *f) {
    trainer *t = &f->t;
    uint64_t budget_bytes = 0;
    f->before_bytes = bench_status_bytes("VmRSS");
    if (choose_budget(t, &budget_bytes) != 0 || make_model(t, budget_bytes, t->options.dry) != 0) {
        return 1;
    }
    if (ms_wrap(t->model) != MS_RESULT_OK) {
        return fail("%s", ms_last_error(t->model));
    }
    if (print_plan(t) != 0) {
        return 1;
    }
    if (t->options.dry) {
        return 0;
    }
    printf("\n");
    if (read_weights(t) != 0 || run_steps(f) != 0) {
        return 1;
    }
    return f->write ? write_folder(f) : 0;
}

static void free_finetune(finetune *f) {
    free_trainer(&f->t);
    if (f->has_file) {
        weight_close(&f->file);
    }
    free(f->train.ids);
    free(f->held_out.ids);
    free(f->seconds);
}

int main(int argc, char **argv) {
    static finetune f;
    settings *o = &f.t.options;
    o->device = "cpu";
    o->mode = "balanced";
    o->optimizer = "adamw";
    o->precision = o->state = "f32";
    o->budget.name = "half";
    o->batch = 1;
    o->sequence = 512;
    o->accumulate = 1;
    f.rate = 1e-5f;
    const option_spec options[] = {
        {"--from", "PATH", OPTION_TEXT, &f.from,
         "weights: a GGUF file, a safetensors file with config.json beside it, or their folder"},
        {"--train", "FILE", OPTION_TEXT, &f.train_path, "tokens to train on, as int32"},
        {"--held-out", "FILE", OPTION_TEXT, &f.held_out_path, "tokens to evaluate on, as int32"},
        {"--device", "NAME", OPTION_TEXT, &o->device, OPTION_DEVICE_HELP},
        {"--batch", "N", OPTION_COUNT, &o->batch, "windows of a step"},
        {"--sequence", "N", OPTION_COUNT, &o->sequence, "tokens of a window"},
        {"--steps", "N", OPTION_COUNT, &o->steps, "steps to take (all)"},
        {"--rank", "N", OPTION_COUNT, &f.rank, "train adapters of this rank alone"},
        {"--base", "NAME", OPTION_TEXT, &f.base,
         "the matrices beside adapters in blocks of codes: q8_0, q4_1 or nf4"},
        {"--decoded", NULL, OPTION_FLAG, &f.decodes, "the base in F32, with the values of --base"},
        {"--offload", "NAME", OPTION_TEXT, &o->offload, OPTION_OFFLOAD_HELP},
        {"--rate", "X", OPTION_REAL, &f.rate, "learning rate, constant"},
        {"--budget", "SIZE", OPTION_BUDGET, &o->budget, OPTION_BUDGET_HELP},
        {"--mode", "NAME", OPTION_TEXT, &o->mode, "conservative, balanced or aggressive"},
        {"--precision", "NAME", OPTION_TEXT, &o->precision,
         "f32, bf16, f16; or bf16-alone or f16-alone, without params in F32 beside"},
        {"--half-grads", NULL, OPTION_FLAG, &o->half_gradients,
         "gradients of weights and token tables in 16 bits, where a step computes in these"},
        {"--state", "NAME", OPTION_TEXT, &o->state,
         "moments of the optimizer: f32, bf16, 8bit where rules allow that, or 8bit-all, of\n"
         "the token table too"},
        {"--write", "FOLDER", OPTION_TEXT, &f.write,
         "write weights and config.json there at the end, as transformers loads them"},
        {"--write-type", "NAME", OPTION_TEXT, &f.write_type, "f32 (default), bf16 or f16"},
        {"--plan", NULL, OPTION_FLAG, &o->plan, "list the plan"},
        {"--dry", NULL, OPTION_FLAG, &o->dry, "plan only"},
    };
    if (take_options("[options]\nFine-tunes published weights inside a byte budget, as "
                     "bench/finetune_pytorch.py does without.",
                     options, OPTIONS_IN(options), argc, argv, NULL) != 0) {
        return 2;
    }
    const int result = prepare(&f) != 0 ? 2 : run_finetune(&f);
    free_finetune(&f);
    return result;
}
