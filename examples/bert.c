/*  bert - trains a BERT to guess the masked bytes of text files, inside a byte budget.

        build/examples/bert                             about a minute, on this repository's own text
        build/examples/bert --budget 40M --steps 500 book.txt
        build/examples/bert --preset large --batch 16 --sequence 128 --dry
        build/cuda/examples/bert --device cuda --preset base --batch 16 --sequence 128 --random

    The trainer is that of gpt2.c; what differs is one table at the end: the net, how a batch is
    drawn, and what is shown after training.

    Devlin et al., "BERT", 2018, section 3.1, task #1: 15 % of the positions are to be guessed. 80 %
    of these hold the mask, 10 % a random token and 10 % the token itself. There are no pairs of
    sentences and no next-sentence head. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "trainer.h"

enum { MASK = BYTE_COUNT, MASKED_PERCENT = 15, SHOWN_BYTES = 64 };

/* A random number from 0 to below 1. */
static double draw_unit(trainer *t) {
    return (double)(next_random(t) >> 11) / 9007199254740992.0;
}

/* How many positions of a sequence are to be guessed: the same in each, so that the factor of the
   loss, which is for the sum over all ranks, is the same in every step. */
static int64_t masked_count(int64_t sequence) {
    const int64_t count = (sequence * MASKED_PERCENT + 50) / 100;
    return count > 0 ? count : 1;
}

static int32_t masked_token(trainer *t, int32_t token) {
    const double mark = draw_unit(t);
    const int64_t others = t->options.random ? t->shape.vocabulary : (int64_t)BYTE_COUNT;
    return mark < 0.8 ? MASK : mark < 0.9 ? (int32_t)(next_random(t) % (uint64_t)others) : token;
}

/* All sets of positions are equally likely (Knuth, "Seminumerical Algorithms", 3.4.2, algorithm
   S). */
static void mask_sequence(trainer *t, int32_t *tokens, int32_t *targets) {
    const int64_t sequence = t->shape.sequence;
    int64_t left = masked_count(sequence);
    for (int64_t i = 0; i < sequence; i++) {
        const bool chosen = draw_unit(t) * (double)(sequence - i) < (double)left;
        targets[i] = chosen ? t->window[i] : -1;
        tokens[i] = chosen ? masked_token(t, t->window[i]) : t->window[i];
        left -= chosen;
    }
}

static void draw_batch(trainer *t) {
    const int64_t sequence = t->shape.sequence;
    const int64_t guesses = t->shape.batch * masked_count(sequence) * (int64_t)ranks_count();
    for (int64_t b = 0; b < t->shape.batch; b++) {
        draw_window(t, sequence);
        mask_sequence(t, t->tokens + b * sequence, t->targets + b * sequence);
    }
    ms_set_loss_factor(t->model, 1.0f / (float)guesses);
}

static int32_t best_byte(const float *logits) {
    int32_t best = 0;
    for (int32_t i = 1; i < BYTE_COUNT; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void print_bytes(const char *title, const int32_t *tokens, int64_t count) {
    printf("%s", title);
    for (int64_t i = 0; i < count; i++) {
        const int32_t token = tokens[i];
        putchar(token == MASK ? '_' : token >= 32 && token < 127 ? (int)token : ' ');
    }
    printf("\n");
}

/* Shows how many masked bytes of one more batch are guessed right, and the start of its first
   sequence. */
static int guess(trainer *t) {
    const int64_t rows = t->shape.batch * t->shape.sequence;
    const int64_t shown = nn_least(t->shape.sequence, SHOWN_BYTES);
    int64_t right = 0, guesses = 0;
    draw_batch(t);
    if (read_logits(t) != 0) {
        return 1;
    }
    print_bytes("\nmasked    ", t->tokens, shown);
    for (int64_t i = 0; i < rows; i++) {
        if (t->targets[i] >= 0) {
            t->tokens[i] = best_byte(t->logits + i * t->shape.vocabulary);
            guesses++;
            right += t->tokens[i] == t->targets[i];
        }
    }
    print_bytes("guessed   ", t->tokens, shown);
    printf("right     %lld of %lld bytes\n", (long long)right, (long long)guesses);
    return 0;
}

static const trainer_kind bert = {"BERT on bytes", "bert-", "small, tiny, base or large",
                                  BYTE_COUNT + 1,  0.999f,  nn_bert,
                                  draw_batch,      guess,   NULL};

int main(int argc, char **argv) {
    return train_program(&bert, argc, argv);
}
