/*  estimate - how much memory and time training a model takes on a GPU, before you have one.

        build/examples/estimate --model gpt2-1558M --batch 1 --sequence 512 --gpu "RTX 3090"
        build/examples/estimate --model llama3-8B --batch 4 --sequence 2048 --gpu H200 --json
        build/examples/estimate path/to/config.json --gpu 24GB --clip 1 --accumulate 8
        build/examples/estimate --family gpt2 --layers 48 --channels 2048 --heads 32 --gpu 16G
        build/examples/estimate --model bert-large --batch 16 --sequence 128 --sweep budgets.svg
        build/examples/estimate --model qwen2.5-7B --gpu 4090 --precision bf16-alone --state bf16
            --gradients bf16 --batch 4 --sequence 1024 --tokens 524288 --ranks 4 --network pcie

    Every number comes from the library: the model is registered as its trainer would do it, planned
    by a dry run, which does not allocate its memory, and described by ms_report. Models are the
    nets of nn.h, which its trainers train.

    settings.h has the options, model.h (with model_config.h), device.h and training.h what follows
    from them; plans.h makes plans, advice.h compares them, and sweep.h makes those over budgets;
    text.h, numbers.h, picture.h and shown.h write what was found. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"

#include "numbers.h"
#include "picture.h"
#include "shown.h"
#include "text.h"

#include <unistd.h>

/* What the program returns. */
enum { STATUS_FITS, STATUS_FAILED, STATUS_USAGE, STATUS_NO_FIT };

static void print_help(void) {
    settings s;
    option_spec specs[ESTIMATE_OPTIONS];
    const char *models[MOST_MODELS], *devices[MOST_DEVICES], *networks[MOST_NETWORKS];
    list_options(&s, specs);
    print_options("[options] [config.json]", specs, ESTIMATE_OPTIONS);
    printf("\nA config.json as published with weights: of GPT-2, BERT, Llama, Mistral, Qwen2.5, "
           "Qwen3,\n"
           "SmolLM2, Gemma 2 and 3, or Phi-3 and 4.\n"
           "Models (sizes given beside a name or a file replace those of the model):\n");
    print_names(stdout, models, list_models(models), 0, "");
    printf("\nDevices:\n");
    print_names(stdout, devices, list_devices(devices), 0, "");
    printf("\nNetworks:\n");
    print_names(stdout, networks, list_networks(networks), 0, "");
    printf("\nThe exit status is %d if the batch fits the budget in some mode, %d if in none, %d\n"
           "after an error, and %d after a mistake in the options.\n",
           STATUS_FITS, STATUS_NO_FIT, STATUS_FAILED, STATUS_USAGE);
}

/* The pictures, which have the same plans over budgets. */
static int write_files(const estimate *e, const findings *f) {
    all_sweeps all;
    memset(&all, 0, sizeof all);
    const int failed = make_sweeps(e, f, &all);
    end_progress(e->shown);
    return failed || (e->options.sweep && is_fit(f) && write_sweep(e, f, &all) != 0) ||
           (e->options.html && write_page(e, f, &all) != 0);
}

/* Writes what was asked for; returns the exit status. */
static int write_all(const estimate *e, const findings *f) {
    const bool lists = e->options.plan || e->options.full_plan;
    if (e->options.json) {
        write_json(e, f, stdout);
    } else {
        print_text(e, f);
    }
    if (lists && list_plan(e, f) != 0) {
        return STATUS_FAILED;
    }
    if (fflush(stdout) != 0) {
        return fail("cannot write: %s", strerror(errno));
    }
    if ((e->options.html || (e->options.sweep && is_fit(f))) && write_files(e, f) != 0) {
        return STATUS_FAILED;
    }
    return is_fit(f) ? STATUS_FITS : STATUS_NO_FIT;
}

int main(int argc, char **argv) {
    estimate e;
    findings f;
    progress shown;
    option_spec specs[ESTIMATE_OPTIONS];
    memset(&e, 0, sizeof e);
    memset(&shown, 0, sizeof shown);
    e.options.utilization = 0.85f;
    list_options(&e.options, specs);
    if (read_options(specs, ESTIMATE_OPTIONS, argc, argv, &e.options.files) != 0) {
        return STATUS_USAGE;
    }
    if (e.options.help) {
        print_help();
        return STATUS_FITS;
    }
    if (e.options.json && (e.options.plan || e.options.full_plan)) {
        fail("--plan is text: not with --json");
        return STATUS_USAGE;
    }
    if ((e.options.sweep && *e.options.sweep == 0) || (e.options.html && *e.options.html == 0)) {
        fail("--sweep and --html need the name of a file");
        return STATUS_USAGE;
    }
    if (choose_training(&e.options) != 0 || choose_shape(&e.options, &e.model) != 0 ||
        choose_target(&e.options, &e.device) != 0) {
        return STATUS_USAGE;
    }
    e.shown = &shown;
    shown.is_shown = e.options.progress || isatty(STDERR_FILENO);
    shown.start_s = seconds_now();
    const int failed = find_all(&e, &f);
    end_progress(&shown);
    return failed ? STATUS_FAILED : write_all(&e, &f);
}
