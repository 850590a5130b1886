/*  gpt2 - trains a GPT-2 on the bytes of text files, inside a byte budget, and lets it write.

        build/examples/gpt2                             about a minute, on this repository's own text
        build/examples/gpt2 --budget 40M --steps 500 book.txt
        build/examples/gpt2 --preset 1558M --batch 1 --sequence 512 --dry
        build/cuda/examples/gpt2 --device cuda --preset 355M --sequence 512 --tf32 --graph --random

    nn_minimal.c trains such a net in one page. What comes in here: text, a budget from the command
    line, modes, optimizers, precisions, checkpoints and a GPU, all by trainer.h. The plan of a model
    of any size is known before a byte of it is allocated: --dry prints it and stops. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "nn.h"

#include "trainer.h"

enum { SAMPLE_BYTES = 240 };

/* One byte from softmax(logits / 0.7). */
static int32_t draw_byte(trainer *t, const float *logits) {
    double weights[BYTE_COUNT], sum = 0.0;
    float highest = logits[0];
    for (int i = 1; i < BYTE_COUNT; i++) {
        highest = logits[i] > highest ? logits[i] : highest;
    }
    for (int i = 0; i < BYTE_COUNT; i++) {
        weights[i] = exp((double)(logits[i] - highest) / 0.7);
        sum += weights[i];
    }
    double mark = (double)(next_random(t) >> 11) / 9007199254740992.0 * sum;
    for (int i = 0; i < BYTE_COUNT; i++) {
        mark -= weights[i];
        if (mark < 0.0) {
            return i;
        }
    }
    return BYTE_COUNT - 1;
}

static void print_byte(int32_t byte) {
    putchar(byte == '\n' || (byte >= 32 && byte < 127) ? (int)byte : '?');
    fflush(stdout);
}

/* Lets the model continue a given start, in the first row of the batch. */
static int sample(trainer *t) {
    const int64_t window = t->shape.sequence, vocabulary = t->shape.vocabulary;
    const int64_t rows = t->shape.batch * window;
    int64_t used = 0;
    for (int64_t i = 0; i < rows; i++) {
        t->tokens[i] = '\n';
        t->targets[i] = -1;
    }
    for (const char *c = "static "; *c && used < window; c++) {
        t->tokens[used++] = *c;
    }
    printf("\nwhat it writes after \"static \":\n\nstatic ");
    for (int n = 0; n < SAMPLE_BYTES; n++) {
        if (read_logits(t) != 0) {
            return 1;
        }
        const int32_t byte = draw_byte(t, t->logits + (used - 1) * vocabulary);
        print_byte(byte);
        if (used == window) {
            memmove(t->tokens, t->tokens + 1, (size_t)(window - 1) * sizeof *t->tokens);
            used--;
        }
        t->tokens[used++] = byte;
    }
    printf("\n");
    return 0;
}

static const trainer_kind gpt2 = {
    "GPT-2 on bytes", "gpt2-", "small, tiny, 124M, 355M, 774M or 1558M",
    BYTE_COUNT,       0.95f,   nn_gpt2,
    draw_next_tokens, sample,  NULL};

int main(int argc, char **argv) {
    return train_program(&gpt2, argc, argv);
}
