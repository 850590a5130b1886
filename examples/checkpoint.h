/*  checkpoint.h - how a trainer saves its run and resumes it, with the options for that.

    Shown here: checkpoints in a folder, of which the newest that is whole is loaded after ms_wrap and
    before params are written, so that the file is read once; and ms_save_extra, by which the position
    in the data is a part of the run. A program

    1. lists CHECKPOINT_OPTIONS(&c) among its options, and calls checkpoint_check once they are read;
    2. after ms_wrap registers with ms_save_extra what else decides how its run goes on, such as the
       state of the random numbers that draw its batches, and calls checkpoint_load;
    3. writes initial params unless c.is_resumed, and inputs that it writes only once in any case;
    4. trains from step c.step on, and calls checkpoint_step after each step.

    The losses are then those of a run that was not interrupted, bit for bit, provided that batches and
    learning rates depend on nothing but options, the step and what was registered.

    Include memscale.h and options.h first. It is C and C++. */
#ifndef MEMSCALE_CHECKPOINT_H
#define MEMSCALE_CHECKPOINT_H

#include <sys/stat.h>
#include <unistd.h>

typedef struct checkpoint {
    const char *folder;     // --save; NULL: nothing is saved
    int64_t every, stop_at; // steps; 0: only at the end, nowhere
    bool resumes;
    int64_t step;       // how many are done; a part of the run
    int64_t saved_step; // of the newest checkpoint
    bool is_resumed, is_stopped;
} checkpoint;

enum { CHECKPOINT_OPTION_COUNT = 4 };

#define CHECKPOINT_OPTIONS(c)                                                                      \
    {"--save", "FOLDER", OPTION_TEXT, &(c)->folder,                                                \
     "save the run in this folder, which must exist, when it ends"},                               \
        {"--checkpoint-every", "N", OPTION_COUNT, &(c)->every, "save it also every N steps"},      \
        {"--resume", NULL, OPTION_FLAG, &(c)->resumes,                                             \
         "go on from the newest checkpoint of the folder, if there is one"},                       \
    {                                                                                              \
        "--stop-at", "N", OPTION_COUNT, &(c)->stop_at,                                             \
            "save after step N and stop there, as if interrupted"                                  \
    }

/* Prints the reason and returns 1 if the options cannot be met: now, rather than after hours. */
static inline int checkpoint_check(const checkpoint *c) {
    struct stat found;
    if (!c->folder && (c->every > 0 || c->resumes || c->stop_at > 0)) {
        return fail("--checkpoint-every, --resume and --stop-at need --save FOLDER");
    }
    if (c->folder && (stat(c->folder, &found) != 0 || !S_ISDIR(found.st_mode))) {
        return fail("--save %s: there is no such folder", c->folder);
    }
    if (c->folder && access(c->folder, W_OK | X_OK) != 0) {
        return fail("--save %s: files cannot be written to this folder", c->folder);
    }
    return 0;
}

/* Loads the newest checkpoint, if that was asked for and there is one. */
static inline int checkpoint_load(checkpoint *c, ms_model *model) {
    const ms_checkpoints in_folder = {c->folder, 0};
    if (ms_save_extra(model, "step", &c->step, sizeof c->step) != MS_RESULT_OK ||
        (c->resumes &&
         ms_load_checkpoint(model, &in_folder, NULL, &c->is_resumed) != MS_RESULT_OK)) {
        return fail("%s", ms_last_error(model));
    }
    c->saved_step = c->step;
    return 0;
}

/* Says whether the run is a new one. */
static inline void checkpoint_print(const checkpoint *c) {
    if (c->is_resumed) {
        printf("resumed   after step %lld, from %s\n", (long long)c->step, c->folder);
    } else if (c->resumes) {
        printf("resumed   nothing: there is no checkpoint in %s, and the run starts anew\n",
               c->folder);
    }
}

/* Saves the run if it is time: so many steps are done, and `is_last` is whether it ends here. Sets
   is_stopped. */
static inline int checkpoint_step(checkpoint *c, ms_model *model, int64_t step, bool is_last) {
    const ms_checkpoints in_folder = {c->folder, 0};
    c->step = step;
    c->is_stopped = !is_last && c->stop_at > 0 && step >= c->stop_at;
    const bool is_due = is_last || c->is_stopped || (c->every > 0 && step % c->every == 0);
    if (c->folder && is_due && step != c->saved_step) {
        if (ms_save_checkpoint(model, &in_folder) != MS_RESULT_OK) {
            return fail("%s", ms_last_error(model));
        }
        c->saved_step = step;
    }
    if (c->is_stopped) {
        printf("stopped   after step %lld; --resume goes on from there\n", (long long)step);
    }
    return 0;
}

#endif // MEMSCALE_CHECKPOINT_H
