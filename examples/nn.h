/*  nn.h - layers for memscale.h, on the CPU and with CUDA: those of transformers, with GPT-2, BERT
    and the family of Llama of any size, and those of convolutional nets.

    For the examples, tests and benchmarks. Include this header alone: it includes memscale.h, for
    its declarations, the headers that hold the kernels, nn_cpu.h and nn_cuda.h, and nn_models.h. All
    of it is C99 and C++11, except the CUDA kernels, and every function is static, except nn_cuda(). With
    OpenMP the loops run in parallel; all matrix products go through ms_gemm.

        ms_model *model;
        ms_create(&config, &model);
        nn_net *net = nn_create(model);
        nn_transformer_config shape = {0};
        nn_preset("gpt2-124M", &shape);
        shape.batch = 4;
        shape.sequence = 64;
        nn_transformer gpt2 = nn_gpt2(net, &shape);        // registers everything, sets the loss
        ms_wrap(model);
        nn_init(net, 1);                                   // initial values of all params
        ms_write(model, gpt2.tokens, tokens);              // int32 (B, T)
        ms_write(model, gpt2.targets, targets);            // int32 (B, T); below 0: ignored
        ms_step(model, &loss);
        ms_destroy(model);
        nn_destroy(net);

    DEVICES. The layers call kernels through a table, nn_device: nn_cpu() or nn_cuda(). A program
    that trains with CUDA is linked with cuda.cu, which nvcc compiles: it includes this header with
    NN_CUDA_IMPLEMENTATION defined. The program sets config.backend = ms_backend_cuda(0) and calls
    nn_create_on(model, nn_cuda()); nothing else changes. For a token or target outside its table
    the CPU returns NN_ERROR_INDEX. A CUDA kernel cannot return an error: it makes the values of
    that row NaN, so that the step ends with MS_RESULT_NONFINITE.

    LAYERS. A layer function registers the layer and its params and returns its output, so that
    calls chain. Errors are sticky, as in memscale.h: an impossible size or a lack of memory returns
    the handle 0, and ms_wrap returns the error.

    LETTERS. B batch, T sequence, C channels, V vocabulary, H heads, rows = B * T. All shapes are
    row-major; a weight is (out, in). Images are (B, C, height, width).

    AXES. If a dim of an input lies along an axis (ms_along), so do the dims of all that is computed
    from it, and ms_reshape can change the batch of any net and the sequence of a transformer. Make
    axes with nn_axis, before the layers.

    NUMERICS. All arithmetic is float32. On the CPU no sum depends on the number of threads: sums
    over rows (gradients of bias, weight of a normalization, embedding) are parallel over columns,
    each column in the order of its rows. (With -Ofast it may matter: the compiler may round the end
    of a loop, and so of a thread's share, otherwise than the rest.) On the GPU no sum depends on
    the order in which blocks run: there are no atomics, and partial sums are added up by a second
    kernel. So each device gives the same bits again in another run and in a recomputation. The two
    devices differ from each other by rounding, but their dropout masks are equal. A block layer has
    the arithmetic of the operator layers, so without dropout both granularities give the same bits.
    Attention that saves its probabilities sums over all keys of a row at once, attention in tiles
    over one tile after another, so these two differ by rounding. Dropout is applied to the
    embedding and to the two branches of each block, not to attention probabilities. Sums over the
    images of a batch are in double; with CUDA, the values that are added in double are sums of 4096
    each.

    16 BITS. All layers can be called in BF16 and F16 (ms_layer_desc.dtypes). In memory,
    activations, their gradients, weight matrices and embedding tables then have 16 bits. A kernel
    converts them as it reads them, and rounds its results once, to nearest even; to a gradient that
    accumulates it adds before that. Biases, params of normalizations, statistics and losses stay
    F32. So do the gradients of params, except those of the weights of linear layers and of
    embedding tables, if nn_half_gradients allows it. Within a layer some values are rounded too: a product before its
    bias is added (with CUDA; on the CPU it is the bias that is rounded); the probabilities of
    attention and their gradients, as operands of products; its output, which backward reads, if it
    works in tiles; and, in convolution, the gradient of pixels that several bands of patches cover,
    once for each band.

    BLOCKS. The weight of a linear layer, and an embedding table, can be a matrix in blocks of codes
    (blocks.h): a frozen param in U8, with the bytes of a row of the matrix in each row
    (nn_param_in_blocks). Calls decode some of its rows at a time to scratch memory, in the dtype of the
    call, and multiply by these; sums over several of such products are F32.

    TILES. All layers except batch normalization declare their rows (ms_layer_desc.tile): images,
    the sequences of attention and of whole blocks, and otherwise tokens. In tiles, outputs and
    dropout masks are those of all rows at once, since what depends on the place of a row counts
    from ms_call.row_begin; the products of fewer rows may round otherwise, and sums over rows, the
    gradients of params, are added up tile by tile. nn_force_tiles sets the rows of a tile.

    FILES, each of which uses only what comes before it:

        nn.h       >>nn public       the declarations of all that a program calls
                   >>nn shared       what both devices use: operands of kernels, geometry, products
                   >>nn functions    of one element, the same on the CPU and in CUDA kernels
                   >>nn device       nn_device, the table of a device's kernels
        nn_cpu.h   >>nn cpu ...      loops, kernels and table of the CPU
        nn_cuda.h  >>nn cuda ...     scratch sizes and table of CUDA
                                     kernels: nn_cuda_layers.h, nn_cuda_attention.h, nn_cuda_images.h
        nn.h       >>nn options      of layers, and the net that lists the params
                   >>nn callbacks    forward and backward of each layer: from views to kernels
                   >>nn layers       the functions that register them
                   >>nn block        a whole transformer block as one layer
                   >>nn adapters     beside linear layers
        nn_models.h                  GPT-2, BERT and the family of Llama

    A NEW LAYER with kernels of its own touches these places:

         1  >>nn public      the declaration of its function, with formula and source
         2  >>nn shared      a struct that its kernels receive, if they need more than sizes
         3  >>nn functions   the formula of an element, which both devices evaluate
         4  >>nn device      a row of NN_KERNELS for forward and for backward, and one of NN_SIZES if
                             they need scratch memory
         5  nn_cpu.h         the kernels nn_<kernel>_kernel, and nn_cpu_<size>
         6  nn_cuda.h        nn_cuda_<size> under ">>nn cuda scratch"
         7  nn_cuda_*.h      the kernels nn_cuda_<kernel>, in the file of their family
         8  >>nn callbacks   its options, if it has some, and two callbacks, which call the kernels
         9  >>nn layers      the function that registers them: operands, what backward reads, what stays
                             F32 in desc.dtypes, rows in desc.tile (nn_declare_rows)
        10  tests/test_nn.c  the layer against float64, with the graphs and formats of all layers
        11  tests/test_half.c  the layer in 16 bits

    It then runs on both devices, in F32, BF16 and F16, in tiles and in dry runs. One that is made of
    kernels that exist touches four of them: 1, 8, 9 and 10. tests/source.sh counts the places that
    name a kernel outside of these.
*/
#ifndef MEMSCALE_NN_H
#define MEMSCALE_NN_H

#include "memscale.h"

#include "blocks.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(NN_CUDA_IMPLEMENTATION)
#include <cuda_runtime.h> // NN_HD needs its __host__ and __device__
#endif

#if defined(__GNUC__)
#define NN_API static __attribute__((unused))
#else
#define NN_API static
#endif

#ifdef __cplusplus
#define NN_EXTERN extern "C"
#else
#define NN_EXTERN extern
#endif

/* A function that CUDA kernels call too: it is compiled for the host and, by nvcc, for the GPU. */
#if defined(__CUDACC__)
#define NN_HD NN_API __host__ __device__ inline
#else
#define NN_HD NN_API inline
#endif

// ------------------------------------------------------------------------------------------------
// >>nn public

/* Lists the params and buffers of a model with their initial distributions. */
typedef struct nn_net nn_net;

typedef enum nn_init_kind { NN_INIT_ZEROS, NN_INIT_ONES, NN_INIT_NORMAL } nn_init_kind;

/* A param or buffer as it was registered; deviation is the standard deviation of NN_INIT_NORMAL. */
typedef struct nn_param_info {
    char name[64]; // such as "h0.qkv.weight", "norm1.mean"
    ms_tensor tensor;
    ms_shape shape;
    nn_init_kind init;
    float deviation;
    blocks_kind blocks; // of nn_param_in_blocks: how its numbers are stored
} nn_param_info;

/* Callbacks of layers return this error, those of ms_gemm or those of the CUDA runtime. */
enum { NN_ERROR_INDEX = 1001 /* a token or target is outside its table */ };

/* The kernels of a device, and the sizes of the scratch memory that they need. A program that calls
   nn_cuda is linked with examples/cuda.cu, which defines it; others need no CUDA. */
typedef struct nn_device nn_device;

NN_API const nn_device *nn_cpu(void);
NN_EXTERN const nn_device *nn_cuda(void);

/* nn_cuda without its kernels, but with the sizes of their scratch memory: for dry runs
   (ms_config.dry_run), on a machine without a GPU, of what a GPU would train. */
NN_API const nn_device *nn_cuda_dry(void);

/* Makes a net for model; NULL: no memory. nn_create uses nn_cpu(). The device must be that of the
   model's backend. */
NN_API nn_net *nn_create(ms_model *model);
NN_API nn_net *nn_create_on(ms_model *model, const nn_device *device);

/* Frees the net, which the layers do not need. NULL is fine. */
NN_API void nn_destroy(nn_net *net);

/* Writes initial values into all params and buffers; they depend on the seed alone, not on the
   number of threads. Errors: OUT_OF_MEMORY, and those of ms_write. */
NN_API ms_result nn_init(nn_net *net, uint64_t seed);

/* The same for the params of adapters alone, with the values that nn_init gives them: for nets whose
   other params are read from a file, or lent from one. */
NN_API ms_result nn_init_adapters(nn_net *net, uint64_t seed);

/* The params in the order of their registration, or by name; NULL: there is none. */
NN_API int64_t nn_param_count(const nn_net *net);
NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index);
NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name);

/* The same for buffers. */
NN_API int64_t nn_buffer_count(const nn_net *net);
NN_API const nn_param_info *nn_buffer_at(const nn_net *net, int64_t index);
NN_API const nn_param_info *nn_find_buffer(const nn_net *net, const char *name);

/* ms_add_axis; the net remembers the axis, so that layers registered afterwards ask for workspace
   for its largest size. */
NN_API ms_axis nn_axis(nn_net *net, const char *name, int64_t size, int64_t largest);

/* ms_param; the net remembers the initial distribution. A param of rank 1 (bias, weight of a
   normalization) has no weight decay. */
NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation);

/* A matrix (rows, columns) in blocks of codes: a frozen param in U8, as weight of nn_linear_tied and as
   table of nn_embedding, which then has no positions. columns must be whole blocks. */
NN_API ms_tensor nn_param_in_blocks(nn_net *net, const char *name, blocks_kind kind, int64_t rows,
                                    int64_t columns, float deviation);

/* ms_write and ms_read of a param by its elements in F32, which those in blocks are encoded from and
   decoded to. Errors: those of ms_write and ms_read, OUT_OF_MEMORY. */
NN_API ms_result nn_write_param(ms_model *model, const nn_param_info *info, const float *values);
NN_API ms_result nn_read_param(ms_model *model, const nn_param_info *info, float *values);

/* Whether layers that are registered from now on let the gradients of their weights be in 16 bits,
   in steps that call them in 16 bits: those of linear layers, also within blocks, and embedding
   tables. At first false. All other gradients of params are F32. */
NN_API void nn_half_gradients(nn_net *net, bool allowed);

/* Whether layers that are registered from now on are called in 16 bits in every plan except that of
   ms_detach, rather than where the budget asks for it. At first false. */
NN_API void nn_force_half(nn_net *net, bool forced);

/* Layers that are registered from now on, and whose rows are independent, are computed in tiles of
   about so many rows in every plan except that of ms_detach, rather than where the budget asks for
   it; 0, as at first: as the plan sees fit. Layers one after the other share their tiles. */
NN_API void nn_force_tiles(nn_net *net, int64_t rows);

/* ms_buffer, F32; the net remembers the initial values. */
NN_API ms_tensor nn_buffer(nn_net *net, const char *name, ms_shape shape, nn_init_kind init);

/* out (B, T, C) = table[tokens] + positions[t] + segment_table[segments].
   tokens and segments are I32 (B, T); table is (V, C), positions (at least T, C), segment_table
   (any, C). positions, and segments with segment_table, may be the handle 0.
   Devlin et al., "BERT", 2018, figure 2; GPT-2 has no segments. */
NN_API ms_tensor nn_embedding(nn_net *net, const char *name, ms_tensor tokens, ms_tensor table,
                              ms_tensor positions, ms_tensor segments, ms_tensor segment_table);

/* out (..., out_features) = x (..., in) * transpose(weight) + bias, with new params
   "<name>.weight" (out, in), normal(0, deviation), and "<name>.bias" (out), zeros. */
NN_API ms_tensor nn_linear(nn_net *net, const char *name, ms_tensor x, int64_t out_features,
                           float deviation);

/* The same with existing params, such as the embedding's table (Press and Wolf, "Using the
   Output Embedding to Improve Language Models", 2017). bias may be the handle 0. */
NN_API ms_tensor nn_linear_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias);

/* y (B, ..., out) + x (B, ..., in) times the transposes of two new weights (rank, in) and
   (out, rank): a linear layer of x that gave y, with an adapter beside it. The second weight is
   zero at first. Hu et al., "LoRA", 2021, section 4.1. nn_freeze: freezes all params except those
   of adapters. */
NN_API ms_tensor nn_adapter(nn_net *net, const char *name, ms_tensor x, ms_tensor y, int64_t rank);
NN_API void nn_freeze(nn_net *net);

/* Over the last axis: (x - mean) / sqrt(variance + 1e-5) * weight + bias, with new params
   "<name>.weight", ones, and "<name>.bias", zeros. Saves mean and 1 / sqrt(...) per row.
   Ba et al., "Layer Normalization", 2016, equation 4. nn_layernorm_tied takes existing params and
   another epsilon (BERT: 1e-12). */
NN_API ms_tensor nn_layernorm(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_layernorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                   ms_tensor bias, float epsilon);

/* Over the last axis: x / sqrt(mean of x^2 + epsilon) * weight, with a new param "<name>.weight",
   ones; or, from_one, times 1 + weight, which is zeros at first. Saves 1 / sqrt(...) per row. Zhang
   and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4. nn_rmsnorm_tied takes an
   existing param. */
NN_API ms_tensor nn_rmsnorm(nn_net *net, const char *name, ms_tensor x, float epsilon,
                            bool from_one);
NN_API ms_tensor nn_rmsnorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                 float epsilon, bool from_one);

/* The same for each head of the queries and of the keys in qkv (B, T, (heads + 2 kv_heads) size),
   with two existing weights (size); values are copied. Henry et al., "Query-Key Normalization for
   Transformers", 2020, in the form of Yang et al., "Qwen3 Technical Report", 2025, section 2. */
typedef struct nn_head_norm_desc {
    int64_t heads, kv_heads;
    ms_tensor queries, keys; // weights
    float epsilon;
    bool from_one;
} nn_head_norm_desc;

NN_API ms_tensor nn_head_norm(nn_net *net, const char *name, ms_tensor qkv,
                              const nn_head_norm_desc *d);

/* How the angles of rotary positions are scaled for longer sequences than a model was trained on at
   first. LINEAR: divided by factor (Chen et al., "Extending Context Window of Large Language Models
   via Positional Interpolation", 2023, equation 4). LLAMA3: only those of pairs that turn less than
   `low` times within `original` positions, and in part those that turn up to `high` times (the
   published code of Llama 3.1, 2024). */
typedef enum nn_rotary_kind { NN_ROTARY_PLAIN, NN_ROTARY_LINEAR, NN_ROTARY_LLAMA3 } nn_rotary_kind;

typedef struct nn_rotary_scaling {
    nn_rotary_kind kind;
    float factor, low, high;
    int64_t original;
} nn_rotary_scaling;

/* x (B, T, columns): in each of the first `heads` heads of `size` elements, the first `turned` are
   pairs, which are turned by the angle t theta^(-2 pair / turned) at position t; what comes after
   these heads is copied. Pairs are elements i and i + turned / 2, as in the checkpoints of Hugging
   Face, or adjacent ones, as in the paper. Su et al., "RoFormer", 2021, equation 34. */
typedef struct nn_rotary_desc {
    int64_t heads; // those of queries and keys together
    int64_t size;
    int64_t turned; // even, at most 256; 0: size
    float theta;    // 0: 10000
    bool adjacent;
    nn_rotary_scaling scaling;
} nn_rotary_desc;

NN_API ms_tensor nn_rotary(nn_net *net, const char *name, ms_tensor x, const nn_rotary_desc *d);

/* Gated units: gate times its logistic function, or the tanh form of its gelu, times up; all of one
   shape. Shazeer, "GLU Variants Improve Transformer", 2020, equation 5. */
NN_API ms_tensor nn_swiglu(nn_net *net, const char *name, ms_tensor gate, ms_tensor up);
NN_API ms_tensor nn_geglu(nn_net *net, const char *name, ms_tensor gate, ms_tensor up);

/* x times a factor; cap * tanh(x / cap). */
NN_API ms_tensor nn_scale(nn_net *net, const char *name, ms_tensor x, float factor);
NN_API ms_tensor nn_softcap(nn_net *net, const char *name, ms_tensor x, float cap);

/* Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2. nn_gelu is the tanh form,
   0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), of GPT-2; nn_gelu_erf the exact form,
   x times the normal distribution function at x, of BERT. */
NN_API ms_tensor nn_gelu(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_gelu_erf(nn_net *net, const char *name, ms_tensor x);

/* a + b, of one shape. */
NN_API ms_tensor nn_add(nn_net *net, const char *name, ms_tensor a, ms_tensor b);

/* Each element becomes 0 with this probability and is divided by 1 - probability otherwise; in
   MS_PHASE_EVAL out is x. The mask is drawn again from the layer's and the step's seed wherever it
   is needed, and never stored. Probability 0 registers nothing and returns x. Srivastava et al.,
   "Dropout", 2014, section 10. */
NN_API ms_tensor nn_dropout(nn_net *net, const char *name, ms_tensor x, float probability);

/* Multi-head self-attention: qkv (B, T, 3C) holds queries, keys and values side by side; out is
   (B, T, C). softmax(Q K^T / sqrt(C / H)) V per head; causal: row t sees the keys 0 ... t.
   save_scores keeps the probabilities (B, H, T, T) for backward. Otherwise they are computed in
   tiles of some queries and some keys, and nothing grows with T * T: what is saved is the logarithm
   of the sum of exponentials of each row, (B, H, T), and backward, which also reads out, computes
   the tiles again. Vaswani et al., "Attention Is All You Need", 2017, equation 1; Dao et al.,
   "FlashAttention", 2022, algorithms 1 and 4. */
NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores);

/* Multi-head self-attention in which groups of heads share keys and values: qkv (B, T, (heads +
   2 kv_heads) size) holds the queries of all heads, then the keys and then the values of kv_heads;
   out is (B, T, heads * size). In tiles, as above. Ainslie et al., "GQA", 2023, section 2.2; with a
   window each query sees so many keys, the last of them that of its own token (Beltagy et al.,
   "Longformer", 2020, section 3.1; Jiang et al., "Mistral 7B", 2023, section 2); a cap bends scores
   smoothly (Gemma Team, "Gemma 2", 2024, section 2). */
typedef struct nn_heads_desc {
    int64_t heads, kv_heads; // kv_heads 0: as many
    bool causal;
    int64_t window; // causal: keys that a query sees; 0: all
    float cap;      // scores become cap * tanh(score / cap); 0: they do not
    float scale;    // of the products of queries and keys; 0: 1 / sqrt(size)
} nn_heads_desc;

NN_API ms_tensor nn_grouped_attention(nn_net *net, const char *name, ms_tensor qkv,
                                      const nn_heads_desc *heads);

/* Loss per row, in the shape of targets: log(sum(exp(logits))) - logits[target]. A row whose
   target is below 0 is ignored: loss 0, gradient 0. logits (rows, V), targets I32 (rows). Backward
   may overwrite the logits with their gradient, softmax(logits) - onehot(target). */
NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets);

/* max(x, 0). Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines",
   2010, section 2. */
NN_API ms_tensor nn_relu(nn_net *net, const char *name, ms_tensor x);

/* sqrt(2 / fan_in): the deviation for weights that read fan_in values and whose output a relu
   reads. He et al., "Delving Deep into Rectifiers", 2015, equation 10. */
NN_API float nn_kaiming(int64_t fan_in);

/* Images (B, in, height, width) become (B, out, ...): each output is the sum of weight times a
   patch of kernel * kernel pixels in all input channels, plus bias; patches begin `stride` pixels
   apart, and there are `padding` zeros around the image. LeCun et al., "Gradient-Based Learning
   Applied to Document Recognition", 1998, section II; as a matrix product: Chellapilla, Puri and
   Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006, section
   3. New params "<name>.weight" (out, in * kernel * kernel), normal(0, nn_kaiming), and
   "<name>.bias" (out), zeros. nn_conv2d_tied takes existing params; bias may be the handle 0. */
NN_API ms_tensor nn_conv2d(nn_net *net, const char *name, ms_tensor x, int64_t out_channels,
                           int64_t kernel, int64_t stride, int64_t padding);
NN_API ms_tensor nn_conv2d_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias, int64_t kernel, int64_t stride, int64_t padding);

/* The largest value of each kernel * kernel patch of each channel, with the geometry of nn_conv2d;
   padding, of at most kernel / 2, is never the largest. Saves the place of each largest value in
   its channel's plane (height, width), in I32. Scherer et al., "Evaluation of Pooling Operations in
   Convolutional Architectures for Object Recognition", 2010, section 3. */
NN_API ms_tensor nn_max_pool(nn_net *net, const char *name, ms_tensor x, int64_t kernel,
                             int64_t stride, int64_t padding);

/* Per channel of images, or of (B, C): (x - mean) / sqrt(variance + 1e-5) * weight + bias, with
   mean and variance of the batch. Each forward also moves the buffers "<name>.mean" and
   "<name>.variance", zeros and ones at first, a tenth of the way to the batch's mean and to its
   variance times n / (n - 1); ms_eval normalizes by these buffers. New params "<name>.weight",
   ones, and "<name>.bias", zeros. Saves mean and 1 / sqrt(...) per channel, from which a
   recomputation makes the output without summing anything. Ioffe and Szegedy, "Batch
   Normalization", 2015, algorithms 1 and 2. nn_batch_norm_tied takes existing params; its
   statistics are its own. */
NN_API ms_tensor nn_batch_norm(nn_net *net, const char *name, ms_tensor x);
NN_API ms_tensor nn_batch_norm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                    ms_tensor bias);

/* The mean of each channel of images: (B, C). Lin, Chen and Yan, "Network In Network", 2014,
   section 3.2. */
NN_API ms_tensor nn_average_pool(nn_net *net, const char *name, ms_tensor x);

/* x (B, ...) as a matrix (B, n); the values stay in their order. */
NN_API ms_tensor nn_flatten(nn_net *net, const char *name, ms_tensor x);

// ------------------------------------------------------------------------------------------------
// >>nn shared  what both devices use: operands of kernels, geometry, products

/* Elements that one CPU thread works on at a time; on every device, also those whose random numbers
   have one key (nn_chunk_key). */
enum { NN_CHUNK = 4096 };

NN_HD int64_t nn_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

NN_API int64_t nn_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* The first error of two results, 0 if there is none. */
NN_API int nn_first(int a, int b) {
    return a != 0 ? a : b;
}

/* Values that a kernel reads or writes: F32, BF16 or F16, all of them in the dtype of the call.
   Kernels compute in F32 and round once, to nearest even, when they store. What is F32 in every
   call (statistics, losses, biases, params of normalizations, scratch memory) is a float pointer.
   data NULL: there are none. */
typedef struct nn_values {
    void *data;
    ms_dtype dtype;
} nn_values;

NN_API nn_values nn_values_in(const void *data, ms_dtype dtype) {
    nn_values values;
    values.data = (void *)(uintptr_t)data; // to read or to write, as in ms_view
    values.dtype = dtype;
    return values;
}

NN_API nn_values nn_f32(const float *data) {
    return nn_values_in(data, MS_DTYPE_F32);
}

/* The formats of values: a layer whose operands have another one is refused when it is registered. */
NN_HD bool nn_has_format(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 || dtype == MS_DTYPE_BF16 || dtype == MS_DTYPE_F16;
}

NN_HD size_t nn_value_bytes(ms_dtype dtype) {
    return dtype == MS_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* The values from element `first` on. */
NN_HD nn_values nn_from(nn_values values, int64_t first) {
    values.data = (char *)values.data + first * (int64_t)nn_value_bytes(values.dtype);
    return values;
}

/* Where a kernel writes: data = beta * data + what it computes, beta 0 or 1; data NULL: nowhere, as
   the result is not needed. */
typedef struct nn_dest {
    void *data;
    ms_dtype dtype;
    float beta;
} nn_dest;

NN_API nn_dest nn_dest_of(nn_values values, float beta) {
    nn_dest dest;
    dest.data = values.data;
    dest.dtype = values.dtype;
    dest.beta = beta;
    return dest;
}

NN_API nn_dest nn_nowhere(void) {
    return nn_dest_of(nn_f32(NULL), 0.0f);
}

/* What is written there. */
NN_HD nn_values nn_values_at(nn_dest dest) {
    nn_values values;
    values.data = dest.data;
    values.dtype = dest.dtype;
    return values;
}

/* Where the random numbers of a layer come from. `step` points to the step's seed in the memory of
   the device; kernels read it when they run, so that a replayed recording draws new numbers. The
   numbers of an element depend on its place among all rows of the layer: a tile draws its own. */
typedef struct nn_seed {
    uint64_t layer;
    const uint64_t *step;
    int64_t first; // place of the kernel's first element
    int branch;    // which dropout of a layer that has several; below 0: it has one
} nn_seed;

/* The dropout that a kernel applies to a value before it goes on; probability 0: none. */
typedef struct nn_drop {
    float probability;
    nn_seed seed;
} nn_drop;

/* One of the tables whose rows an embedding adds up: output row r takes row index[r] of the table,
   or row (first + r) % period if index is NULL: a tile begins with row `first`. table.data NULL:
   there is none. */
typedef struct nn_lookup {
    nn_values table;
    const int32_t *index;
    int64_t entries, first, period;
} nn_lookup;

/* A matrix in blocks of codes. */
typedef struct nn_coded {
    const uint8_t *blocks;
    blocks_kind kind;
    int64_t rows, columns;
} nn_coded;

/* Rows that a kernel works on come in groups: `group` of them follow each other, and the groups begin
   `apart` elements from one another, as do the queries of a token within its queries, keys and
   values. group 0: all rows follow each other. */
typedef struct nn_row_groups {
    int64_t group, apart;
} nn_row_groups;

/* A normalization of rows of this width. It saves mean and rstd (rows). mean NULL: by the root of
   the mean square, without a mean and a bias. */
typedef struct nn_norm {
    int64_t rows, width;
    nn_row_groups places; // of rows; without groups where mean is not NULL
    const float *weight, *bias;
    float *mean, *rstd;
    float epsilon;
    bool from_one; // 1 + weight takes the place of weight; only where mean is NULL
} nn_norm;

/* The element at which a row of a normalization begins. */
NN_HD int64_t nn_row_place(const nn_norm *n, int64_t row) {
    return n->places.group == 0
               ? row * n->width
               : row / n->places.group * n->places.apart + row % n->places.group * n->width;
}

/* Columns first ... first + count - 1 of a matrix whose rows are `stride` elements apart. */
typedef struct nn_column_range {
    int64_t first, count, stride;
} nn_column_range;

/* What multiplies in a gated unit: x times the logistic function of x, or the tanh form of gelu. */
typedef enum nn_gate { NN_GATE_SILU, NN_GATE_GELU } nn_gate;

enum { NN_PAIRS = 128 }; // of a head, at most, that rotary positions turn

/* Rows of tokens, of so many columns: `heads` heads of `size` elements, and then columns that are
   copied. In each head the elements of `pairs` pairs are turned by the angle of the pair, position
   times inverse[pair]; elements that are in no pair are copied. Row r is at the position
   (first + r) % period. */
typedef struct nn_turns {
    int64_t rows, columns, first, period;
    int64_t heads, size, pairs;
    bool adjacent; // pair i has the elements 2 i and 2 i + 1; otherwise i and pairs + i
    bool back;     // turned by the opposite angles
    float inverse[NN_PAIRS];
} nn_turns;

/* The first element of a pair, and how far the second one is from it. */
NN_HD int64_t nn_pair_place(const nn_turns *n, int64_t pair) {
    return n->adjacent ? 2 * pair : pair;
}

NN_HD int64_t nn_pair_apart(const nn_turns *n) {
    return n->adjacent ? 1 : n->pairs;
}

/* Values (images, channels, plane), plane = height * width. */
typedef struct nn_planes {
    int64_t images, channels, plane;
} nn_planes;

NN_API int64_t nn_planes_count(nn_planes n) {
    return n.images * n.channels * n.plane;
}

/* Where a batch normalization takes mean and variance from. */
typedef enum nn_moments { NN_MOMENTS_OF_BATCH, NN_MOMENTS_RUNNING, NN_MOMENTS_SAVED } nn_moments;

/* The operands of a batch normalization. */
typedef struct nn_batch_norm_values {
    nn_moments moments;
    const float *weight, *bias;
    float *mean, *rstd; // saved by forward; may be NULL, except with NN_MOMENTS_SAVED
    float *running_mean, *running_variance; // NN_MOMENTS_OF_BATCH updates them; NULL: it does not
    float epsilon, momentum;
} nn_batch_norm_values;

/* A window of kernel * kernel pixels that slides over images (images, channels, height, width) with
   padding around them, `stride` pixels at a time. Each of its positions is a patch: there are
   out_height rows of out_width patches. */
typedef struct nn_window {
    int64_t images, channels, height, width;
    int64_t kernel, stride, padding;
    int64_t out_height, out_width; // below 1: the kernel does not fit
} nn_window;

NN_API nn_window nn_window_of(ms_shape x, int64_t kernel, int64_t stride, int64_t padding) {
    nn_window w;
    w.images = x.dim[0];
    w.channels = x.dim[1];
    w.height = x.dim[2];
    w.width = x.dim[3];
    w.kernel = kernel;
    w.stride = stride;
    w.padding = padding;
    const int64_t down = w.height + 2 * padding - kernel;
    const int64_t across = w.width + 2 * padding - kernel;
    w.out_height = down < 0 ? 0 : down / stride + 1;
    w.out_width = across < 0 ? 0 : across / stride + 1;
    return w;
}

/* Whether each patch is one pixel, and the patches are all pixels in order. A convolution then
   needs no copies of its patches (nn_columns_kernel): the image itself is the matrix of columns. */
NN_API bool nn_is_pointwise(const nn_window *w) {
    return w->kernel == 1 && w->stride == 1 && w->padding == 0;
}

/* Rows of the matrix of columns: values of a patch in all channels. */
NN_API int64_t nn_window_depth(const nn_window *w) {
    return w->channels * w->kernel * w->kernel;
}

/* Patches of an image, which are the columns of that matrix. */
NN_API int64_t nn_window_patches(const nn_window *w) {
    return w->out_height * w->out_width;
}

/* The patches begin ... end - 1 of a row, or the rows of patches begin ... end - 1. */
typedef struct nn_span {
    int64_t begin, end;
} nn_span;

/* The rows of patches begin ... begin + count - 1, out of out_height. */
typedef struct nn_patch_rows {
    int64_t begin, count;
} nn_patch_rows;

/* x is (rows, in), y is (rows, out), weight is (out, in). */
typedef struct nn_linear_size {
    int64_t rows, in, out;
} nn_linear_size;

/* Sizes of an attention. A row of qkv has the queries of `heads` heads, then the keys and then the
   values of kv_heads, each of `size` elements; heads / kv_heads heads of queries, one after the other,
   share keys and values. */
typedef struct nn_attention_size {
    int64_t batch, sequence, heads, kv_heads, size;
    int64_t window; // keys that a query sees, that of its own token the last of them; 0: no limit
    float scale;    // scores are products times this
    float cap;      // and then cap * tanh(score / cap); 0: no cap
    bool causal;
} nn_attention_size;

/* Elements of a row of qkv and of the output; of what comes before the keys and before the values;
   and heads of queries that share keys. */
NN_HD int64_t nn_attention_columns(const nn_attention_size *n) {
    return (n->heads + 2 * n->kv_heads) * n->size;
}

NN_HD int64_t nn_attention_width(const nn_attention_size *n) {
    return n->heads * n->size;
}

NN_HD int64_t nn_attention_keys(const nn_attention_size *n) {
    return n->heads * n->size;
}

NN_HD int64_t nn_attention_values(const nn_attention_size *n) {
    return (n->heads + n->kv_heads) * n->size;
}

NN_HD int64_t nn_attention_shared(const nn_attention_size *n) {
    return n->heads / n->kv_heads;
}

/* The first key that a query sees, and the number after the last. */
NN_HD int64_t nn_first_key(const nn_attention_size *n, int64_t query) {
    const int64_t first = n->window > 0 ? query + 1 - n->window : 0;
    return first > 0 ? first : 0;
}

NN_HD int64_t nn_keys_end(const nn_attention_size *n, int64_t query) {
    return n->causal ? query + 1 : n->sequence;
}

/* The number after the last query that sees a key. */
NN_HD int64_t nn_queries_end(const nn_attention_size *n, int64_t key) {
    return n->window > 0 && key + n->window < n->sequence ? key + n->window : n->sequence;
}

/* Values as a matrix for ms_gemm, to read or to write. */
NN_API ms_matrix nn_matrix(nn_values values, int64_t rows, int64_t cols, int64_t stride) {
    ms_matrix matrix;
    memset(&matrix, 0, sizeof matrix);
    matrix.data = values.data;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.stride = stride;
    matrix.dtype = values.dtype;
    return matrix;
}

/* The values at these rows of patches, in `count` planes (patches) of one image. */
NN_API ms_matrix nn_patch_matrix(nn_values planes, int64_t count, nn_patch_rows rows,
                                 const nn_window *w) {
    return nn_matrix(nn_from(planes, rows.begin * w->out_width), count, rows.count * w->out_width,
                     nn_window_patches(w));
}

/* The two products of a linear layer's backward: the same calls on every device. */
NN_API int nn_linear_products(const ms_call *call, nn_dest dx, nn_dest dweight, nn_values dy,
                              nn_values x, nn_values weight, nn_linear_size n) {
    const ms_matrix slope = nn_matrix(dy, n.rows, n.out, n.out);
    int result = 0;
    if (dx.data != NULL) {
        result = (int)ms_gemm(call, 1.0f, slope, nn_matrix(weight, n.out, n.in, n.in), dx.beta,
                              nn_matrix(nn_values_at(dx), n.rows, n.in, n.in));
    }
    if (result == 0 && dweight.data != NULL) {
        result = (int)ms_gemm(call, 1.0f, ms_transpose(slope), nn_matrix(x, n.rows, n.in, n.in),
                              dweight.beta, nn_matrix(nn_values_at(dweight), n.out, n.in, n.in));
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>nn functions  of one element, without branches and calls, so that loops over them vectorize

NN_HD uint32_t nn_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

NN_HD float nn_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* By the bits, since -Ofast folds x != x. */
NN_HD bool nn_is_nan(float x) {
    return (nn_bits_of(x) & 0x7fffffffu) > 0x7f800000u;
}

NN_HD float nn_nan(void) {
    return nn_of_bits(0x7fc00000u);
}

/* 16-bit floats by their bits, rounded to the nearest, ties to even. NaN stays NaN. */
NN_HD float nn_of_bf16(uint16_t bits16) {
    return nn_of_bits((uint32_t)bits16 << 16);
}

NN_HD uint16_t nn_bf16_of(float x) {
    const uint32_t bits = nn_bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

/* The exponent moves by 127 - 15; infinity and NaN get the largest. A subnormal number gets the
   exponent of 2^-14, which is then subtracted: without subnormal floats, which -Ofast flushes. */
NN_HD float nn_of_f16(uint16_t bits16) {
    const uint32_t rest = bits16 & 0x7fffu;
    const uint32_t small = nn_bits_of(nn_of_bits(0x38800000u | rest << 13) - 6.103515625e-5f);
    const uint32_t normal = (rest << 13) + (rest < 0x7c00u ? 0x38000000u : 0x70000000u);
    return nn_of_bits((uint32_t)(bits16 & 0x8000u) << 16 | (rest < 0x400u ? small : normal));
}

/* 65520 and above become infinity. The last bits of the sum of a subnormal number and 0.5 count
   units of 2^-24. */
NN_HD uint16_t nn_f16_of(float x) {
    const uint32_t bits = nn_bits_of(x);
    const uint32_t rest = bits & 0x7fffffffu;
    const uint32_t small = nn_bits_of(nn_of_bits(rest) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
    const uint32_t large = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t bits16 = rest < 0x38800000u ? small : rest < 0x477ff000u ? normal : large;
    return (uint16_t)((bits >> 16 & 0x8000u) | bits16);
}

/* A single value. */
NN_HD float nn_get(nn_values values, int64_t i) {
    return values.dtype == MS_DTYPE_F32   ? ((const float *)values.data)[i]
           : values.dtype == MS_DTYPE_F16 ? nn_of_f16(((const uint16_t *)values.data)[i])
                                          : nn_of_bf16(((const uint16_t *)values.data)[i]);
}

NN_HD void nn_set(nn_values values, int64_t i, float x) {
    if (values.dtype == MS_DTYPE_F32) {
        ((float *)values.data)[i] = x;
    } else {
        ((uint16_t *)values.data)[i] = values.dtype == MS_DTYPE_F16 ? nn_f16_of(x) : nn_bf16_of(x);
    }
}

/* max(x, 0), and NaN stays NaN: what is below -0 up to minus infinity becomes 0. */
NN_HD float nn_relu_value(float x) {
    return nn_bits_of(x) - 0x80000001u < 0x7f800000u ? 0.0f : x;
}

/* e^x for x clamped to [-87, 88], relative error about 2e-7: x = n ln 2 + r; a polynomial, fitted
   at Chebyshev nodes, gives e^r, and n is added to the exponent. n is the integer in the bits of
   the shifted x, since -Ofast would cancel a subtraction of what was added. NaN stays NaN. */
NN_HD float nn_exp(float any) {
    const float rounder = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    float x = any < -87.0f ? -87.0f : any;
    x = x > 88.0f ? 88.0f : x;
    const uint32_t whole = nn_bits_of(x * 1.44269504f + rounder) - 0x4b400000u;
    const float n = (float)(int32_t)whole;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.392655075e-3f;
    p = p * r + 8.363472298e-3f;
    p = p * r + 4.166655242e-2f;
    p = p * r + 1.666657478e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return nn_is_nan(any) ? any : p * nn_of_bits((whole + 127u) << 23);
}

/* Of a row of scores whose largest is `most`, and whose sum of exponentials relative to it is
   total: the logarithm of the sum of exponentials, and what makes the exponentials probabilities.
   NaN if all scores are minus infinity. */
NN_HD float nn_log_sum(float most, float total) {
    return most > -FLT_MAX ? most + logf(total) : nn_nan();
}

NN_HD float nn_share(float most, float total) {
    return most > -FLT_MAX ? 1.0f / total : nn_nan();
}

/* The tanh form is x * s(x), s the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3). */
NN_HD float nn_gelu_tanh_share(float x) {
    return 1.0f / (1.0f + nn_exp(-1.59576912f * (x + 0.044715f * x * x * x)));
}

NN_HD float nn_gelu_tanh_value(float x) {
    return x * nn_gelu_tanh_share(x);
}

NN_HD float nn_gelu_tanh_slope(float x) {
    const float s = nn_gelu_tanh_share(x);
    return s + x * s * (1.0f - s) * (1.59576912f + 0.21406445f * x * x);
}

/* x times the logistic function of x, and its slope. */
NN_HD float nn_silu_value(float x) {
    return x / (1.0f + nn_exp(-x));
}

NN_HD float nn_silu_slope(float x) {
    const float s = 1.0f / (1.0f + nn_exp(-x));
    return s + x * s * (1.0f - s);
}

NN_HD float nn_gate_value(nn_gate kind, float x) {
    return kind == NN_GATE_SILU ? nn_silu_value(x) : nn_gelu_tanh_value(x);
}

NN_HD float nn_gate_slope(nn_gate kind, float x) {
    return kind == NN_GATE_SILU ? nn_silu_slope(x) : nn_gelu_tanh_slope(x);
}

/* By its series near 0, where 1 - 2 / (e^2x + 1) would lose digits. Relative error about 4e-7. */
NN_HD float nn_tanh(float x) {
    const float a = x < 0.0f ? -x : x;
    const float s = x * x;
    float p = 2.186948854e-2f;
    p = p * s - 5.396825397e-2f;
    p = p * s + 1.333333333e-1f;
    p = p * s - 3.333333333e-1f;
    const float near_zero = x + x * s * p;
    const float far_off = 1.0f - 2.0f / (nn_exp(2.0f * a) + 1.0f);
    return a < 0.25f ? near_zero : x < 0.0f ? -far_off : far_off;
}

/* A soft cap of x, and its slope where it has the value y. */
NN_HD float nn_cap_value(float x, float cap) {
    return cap * nn_tanh(x / cap);
}

NN_HD float nn_cap_slope(float y, float cap) {
    const float share = y / cap;
    return 1.0f - share * share;
}

/* The normal distribution function. For a = |x| and t = 1 / (1 + 0.35 a), its value at -a over
   t exp(-a^2 / 2) is smooth on all of 0 < t <= 1: a polynomial fitted at Chebyshev nodes, relative
   error 4e-8. bell is exp(-x^2 / 2). */
NN_HD float nn_normal(float x, float bell) {
    const float a = x < 0.0f ? -x : x;
    const float t = 1.0f / (1.0f + 0.35f * a);
    float p = -2.967952192e-2f;
    p = p * t + 1.465458274e-1f;
    p = p * t - 2.609612346e-1f;
    p = p * t + 1.650509983e-1f;
    p = p * t - 2.704660781e-2f;
    p = p * t + 1.071145907e-1f;
    p = p * t + 1.194449142e-1f;
    p = p * t + 1.399122924e-1f;
    p = p * t + 1.396187097e-1f;
    const float tail = p * t * bell;
    return x < 0.0f ? tail : 1.0f - tail;
}

NN_HD float nn_gelu_erf_value(float x) {
    return x * nn_normal(x, nn_exp(-0.5f * x * x));
}

NN_HD float nn_gelu_erf_slope(float x) {
    const float bell = nn_exp(-0.5f * x * x);
    return nn_normal(x, bell) + x * bell * 0.398942280f;
}

/* Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014: the 64-bit finalizer. */
NN_HD uint64_t nn_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* 32 random bits for a counter under a key: two rounds of multiply and shift, in 32-bit
   arithmetic, which vectors have. */
NN_HD uint32_t nn_random(uint64_t key, uint32_t counter) {
    uint32_t x = counter * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x ^= (uint32_t)(key >> 32);
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

/* The seed of one dropout of a layer in the current step. */
NN_HD uint64_t nn_seed_value(nn_seed seed) {
    const uint64_t value = seed.layer ^ *seed.step;
    return seed.branch < 0 ? value : nn_mix(value + (uint64_t)seed.branch);
}

/* An element whose random bits are below this is dropped. */
NN_HD uint32_t nn_threshold(float probability) {
    return (uint32_t)((double)probability * 4294967296.0);
}

/* The key of the chunk that begins with element `begin`. */
NN_HD uint64_t nn_chunk_key(uint64_t seed, int64_t begin) {
    return nn_mix(seed ^ nn_mix((uint64_t)begin));
}

/* Moves the running statistics of a channel towards mean and variance of a batch of n values. On
   average the variance of n values is (n - 1) / n times the variance of all. */
NN_HD void nn_move_running(const nn_batch_norm_values *v, int64_t channel, float mean,
                           float variance, int64_t n) {
    const float keep = 1.0f - v->momentum;
    const float unbiased = n > 1 ? variance * ((float)n / (float)(n - 1)) : variance;
    v->running_mean[channel] = keep * v->running_mean[channel] + v->momentum * mean;
    v->running_variance[channel] = keep * v->running_variance[channel] + v->momentum * unbiased;
}

/* The place in its plane of the largest value of patch (y, x): the first of equal ones, and a NaN
   if there is one. */
NN_HD int64_t nn_largest_place(nn_values plane, const nn_window *w, int64_t y, int64_t x) {
    const int64_t top = y * w->stride - w->padding;
    const int64_t left = x * w->stride - w->padding;
    const int64_t bottom = nn_least(top + w->kernel, w->height);
    const int64_t right = nn_least(left + w->kernel, w->width);
    int64_t place = -1;
    float largest = 0.0f;
    for (int64_t i = top < 0 ? 0 : top; i < bottom; i++) {
        for (int64_t k = left < 0 ? 0 : left; k < right; k++) {
            const float value = nn_get(plane, i * w->width + k);
            if (place < 0 || value > largest || nn_is_nan(value)) {
                place = i * w->width + k;
                largest = value;
            }
        }
    }
    return place;
}

// ------------------------------------------------------------------------------------------------
// >>nn device  the table between callbacks and kernels

/* What the layers are made of. A kernel enqueues its work on call->stream (on the CPU: does it) and
   returns 0 or an error number. Values, and pointers to floats and integers, are memory of the
   device, pointers to structs are memory of the host. Gradients of tables and of what is F32 in
   every call are F32. `work` is scratch memory of as many floats as the ..._floats
   function returns. That number never shrinks as sizes grow, so that scratch memory for the largest
   size is enough for all.
   A device has a function for each row of these two tables: the CPU nn_cpu_<size> and
   nn_<kernel>_kernel, CUDA nn_cuda_<size> and nn_cuda_<kernel>.

   attention_queries: causal attention omits the products of so many queries at a time with the keys
   that none of them sees; 0: it omits none. column_floats: for the backward of embeddings and linear
   layers. layernorm_floats: for backward. batch_norm_floats: forward and backward. */
#define NN_SIZES(S)                                                                                \
    S(attention_queries, (bool keeps_scores))                                                      \
    S(column_floats, (int64_t rows, int64_t columns))                                              \
    S(layernorm_floats, (int64_t rows, int64_t width))                                             \
    S(attention_floats, (nn_attention_size n, bool backward))                                      \
    S(tiled_attention_floats, (nn_attention_size n, bool backward))                                \
    S(conv2d_floats, (const nn_window *w, int64_t out, bool backward))                             \
    S(batch_norm_floats, (nn_planes n))

/* copy: y = x, or y += x: also the gradient of a sum or of another shape.
   copy_columns: the same for some columns of a matrix.
   linear_gelu: h = x * transpose(weight) + bias, y = gelu(h).
   linear_add: y = residual + dropout(x * transpose(weight) + bias).
   attention: scores (B, H, T, T) keeps the probabilities for backward; in forward its data may be
   NULL. tiled_attention: without probabilities of whole rows. log_sums (B, H, T): the logarithm of
   the sum of exponentials of each row; in forward its data may be NULL. dqkv is not qkv.
   rotary: the pairs of y = those of x turned, or back; y may be x. What is in no pair is left alone.
   gated: y = function(gate) * up; y may be either. Its gradients may be where operands are.
   softcap: y = cap * tanh(x / cap); y may be x. Its gradient comes from y.
   decode: row r of y = row index[r] of a matrix in blocks, or row first + r if index is NULL. */
#define NN_KERNELS(K)                                                                              \
    K(copy, (const ms_call *call, nn_dest y, nn_values x, int64_t count))                          \
    K(copy_columns,                                                                                \
      (const ms_call *call, nn_dest y, nn_values x, int64_t rows, nn_column_range c))              \
    K(add, (const ms_call *call, nn_values y, nn_values a, nn_values b, int64_t count))            \
    K(dropout, (const ms_call *call, nn_dest y, nn_values x, int64_t count, float probability,     \
                nn_seed seed))                                                                     \
    K(gelu, (const ms_call *call, nn_values y, nn_values x, int64_t count, bool erf_form))         \
    K(gelu_backward,                                                                               \
      (const ms_call *call, nn_dest dx, nn_values dy, nn_values x, int64_t count, bool erf_form))  \
    K(gated, (const ms_call *call, nn_values y, nn_values gate, nn_values up, int64_t count,       \
              nn_gate kind))                                                                       \
    K(gated_backward, (const ms_call *call, nn_dest dgate, nn_dest dup, nn_values dy,              \
                       nn_values gate, nn_values up, int64_t count, nn_gate kind))                 \
    K(scale, (const ms_call *call, nn_dest y, nn_values x, int64_t count, float factor))           \
    K(softcap, (const ms_call *call, nn_values y, nn_values x, int64_t count, float cap))          \
    K(softcap_backward,                                                                            \
      (const ms_call *call, nn_dest dx, nn_values dy, nn_values y, int64_t count, float cap))      \
    K(embedding, (const ms_call *call, nn_values y, const nn_lookup *lookups, int lookup_count,    \
                  int64_t rows, int64_t channels))                                                 \
    K(embedding_backward, (const ms_call *call, nn_dest dtable, const nn_lookup *lookup,           \
                           nn_values dy, int64_t rows, int64_t channels, float *work))             \
    K(decode, (const ms_call *call, nn_values y, nn_coded from, const int32_t *index,              \
               int64_t first, int64_t rows))                                                       \
    K(linear, (const ms_call *call, nn_values y, nn_values x, nn_values weight, const float *bias, \
               nn_linear_size n))                                                                  \
    K(linear_gelu, (const ms_call *call, nn_values y, nn_values h, nn_values x, nn_values weight,  \
                    const float *bias, nn_linear_size n, bool erf_form))                           \
    K(linear_add, (const ms_call *call, nn_values y, nn_values residual, nn_values x,              \
                   nn_values weight, const float *bias, nn_linear_size n, const nn_drop *drop))    \
    K(linear_backward,                                                                             \
      (const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias, nn_values dy, nn_values x, \
       nn_values weight, nn_linear_size n, float *work))                                           \
    K(layernorm, (const ms_call *call, nn_values y, nn_values x, const nn_norm *n))                \
    K(layernorm_backward, (const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias,        \
                           nn_values dy, nn_values x, const nn_norm *n, float *work))              \
    K(rotary, (const ms_call *call, nn_dest y, nn_values x, const nn_turns *n))                    \
    K(attention, (const ms_call *call, nn_values out, nn_values scores, nn_values qkv,             \
                  float *work, nn_attention_size n))                                               \
    K(attention_backward, (const ms_call *call, nn_dest dqkv, nn_values dout, nn_values scores,    \
                           nn_values qkv, float *work, nn_attention_size n))                       \
    K(tiled_attention, (const ms_call *call, nn_values out, float *log_sums, nn_values qkv,        \
                        float *work, nn_attention_size n))                                         \
    K(tiled_attention_backward,                                                                    \
      (const ms_call *call, nn_dest dqkv, nn_values dout, nn_values out, const float *log_sums,    \
       nn_values qkv, float *work, nn_attention_size n))                                           \
    K(cross_entropy, (const ms_call *call, float *losses, float *stats, nn_values logits,          \
                      const int32_t *targets, int64_t rows, int64_t classes))                      \
    K(cross_entropy_backward,                                                                      \
      (const ms_call *call, nn_dest dlogits, const float *dlosses, const float *stats,             \
       nn_values logits, const int32_t *targets, int64_t rows, int64_t classes))                   \
    K(relu, (const ms_call *call, nn_values y, nn_values x, int64_t count))                        \
    K(relu_backward, (const ms_call *call, nn_dest dx, nn_values dy, nn_values y, int64_t count))  \
    K(conv2d, (const ms_call *call, nn_values y, nn_values x, nn_values weight, const float *bias, \
               int64_t out, const nn_window *w, float *work))                                      \
    K(conv2d_backward,                                                                             \
      (const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias, nn_values dy, nn_values x, \
       nn_values weight, int64_t out, const nn_window *w, float *work))                            \
    K(max_pool,                                                                                    \
      (const ms_call *call, nn_values y, int32_t *places, nn_values x, const nn_window *w))        \
    K(max_pool_backward,                                                                           \
      (const ms_call *call, nn_dest dx, nn_values dy, const int32_t *places, const nn_window *w))  \
    K(batch_norm, (const ms_call *call, nn_values y, nn_values x, const nn_batch_norm_values *v,   \
                   nn_planes n, float *work))                                                      \
    K(batch_norm_backward,                                                                         \
      (const ms_call *call, nn_dest dx, nn_dest dweight, nn_dest dbias, nn_values dy, nn_values x, \
       const nn_batch_norm_values *v, nn_planes n, float *work))                                   \
    K(average, (const ms_call *call, nn_values means, nn_values x, nn_planes n))                   \
    K(average_backward, (const ms_call *call, nn_dest dx, nn_values dmeans, nn_planes n))

#define NN_SIZE_FIELD(name, operands)   int64_t(*name) operands;
#define NN_KERNEL_FIELD(name, operands) int(*name) operands;

struct nn_device {
    const char *name;
    int64_t widest; // columns of the longest row that can be normalized, or be a softmax; 0: any
    NN_SIZES(NN_SIZE_FIELD)
    NN_KERNELS(NN_KERNEL_FIELD)
};

#include "nn_cpu.h"
#include "nn_cuda.h"

// ------------------------------------------------------------------------------------------------
// >>nn options  of layers, and the net

/* What the callbacks of a layer cannot see from its views: the device, or a struct that begins with
   this one. It is memory of the model (nn_attach). */
typedef struct nn_options {
    const nn_device *device; // that of the net
} nn_options;

/* Params or buffers in the order of their registration. */
typedef struct nn_list {
    nn_param_info *infos;
    int64_t count, capacity;
} nn_list;

struct nn_net {
    ms_model *model;
    const nn_device *device;
    nn_list params, buffers;
    bool half_gradients, forces_half; // for layers that are registered from now on
    int64_t tile_rows;                // likewise; 0: not forced
    int64_t axis_size[MS_LIMIT_AXES], axis_largest[MS_LIMIT_AXES]; // 0: not an axis of nn_axis
};

typedef struct nn_name {
    char text[64];
} nn_name;

NN_API nn_name nn_join(const char *prefix, const char *suffix) {
    nn_name name;
    snprintf(name.text, sizeof name.text, "%.46s.%.16s", prefix, suffix); // long names are cut
    return name;
}

NN_API nn_net *nn_create_on(ms_model *model, const nn_device *device) {
    nn_net *net = (nn_net *)calloc(1, sizeof *net);
    if (net != NULL) {
        net->model = model;
        net->device = device;
    }
    return net;
}

NN_API nn_net *nn_create(ms_model *model) {
    return nn_create_on(model, nn_cpu());
}

NN_API void nn_destroy(nn_net *net) {
    if (net == NULL) {
        return;
    }
    free(net->params.infos);
    free(net->buffers.infos);
    free(net);
}

NN_API void nn_half_gradients(nn_net *net, bool allowed) {
    net->half_gradients = allowed;
}

NN_API void nn_force_half(nn_net *net, bool forced) {
    net->forces_half = forced;
}

NN_API void nn_force_tiles(nn_net *net, int64_t rows) {
    net->tile_rows = rows;
}

/* Refuses with a sticky error of the model; returns the handle 0, for the caller to return. */
NN_API ms_tensor nn_refuse(nn_net *net, const char *reason) {
    const ms_tensor none = {0};
    ms_refuse(net->model, reason);
    return none;
}

/* Whether the device normalizes rows of this width; false after a sticky error. */
NN_API bool nn_check_width(nn_net *net, const char *layer, int64_t width) {
    char reason[160];
    if (net->device->widest == 0 || width <= net->device->widest) {
        return true;
    }
    snprintf(reason, sizeof reason,
             "nn: layer %.60s: rows of %lld values, and %s has kernels for up to %lld", layer,
             (long long)width, net->device->name, (long long)net->device->widest);
    nn_refuse(net, reason);
    return false;
}

/* Makes room for one more element; false: no memory. */
NN_API bool nn_reserve(void **array, size_t element_bytes, int64_t count, int64_t *capacity) {
    if (count < *capacity) {
        return true;
    }
    const int64_t wanted = *capacity == 0 ? 64 : 2 * *capacity;
    void *larger = realloc(*array, (size_t)wanted * element_bytes);
    if (larger == NULL) {
        return false;
    }
    *array = larger;
    *capacity = wanted;
    return true;
}

/* Memory of the model with a copy of these options, which begin with nn_options, and the device of
   the net. NULL, after an error that sticks: no memory. */
NN_API void *nn_attach(nn_net *net, const void *options, size_t bytes) {
    void *memory = ms_model_alloc(net->model, bytes, NULL);
    if (memory != NULL) {
        memcpy(memory, options, bytes);
        ((nn_options *)memory)->device = net->device;
    }
    return memory;
}

/* Of a layer without options of its own. */
NN_API void *nn_attach_nothing(nn_net *net) {
    nn_options options;
    options.device = net->device;
    return nn_attach(net, &options, sizeof options);
}

NN_API ms_axis nn_axis(nn_net *net, const char *name, int64_t size, int64_t largest) {
    const ms_axis axis = ms_add_axis(net->model, name, size, largest);
    const ms_shape along = ms_along(ms_shape1(size), 0, axis);
    for (int a = 0; a < MS_LIMIT_AXES; a++) {
        if (axis.id != 0 && (along.axes[0] >> a & 1) != 0) {
            net->axis_size[a] = size;
            net->axis_largest[a] = largest;
        }
    }
    return axis;
}

/* Appends an entry to a list, without its tensor; NULL: no memory. */
NN_API nn_param_info *nn_append(nn_net *net, nn_list *list, const char *name, ms_shape shape,
                                nn_init_kind init, float deviation) {
    void *array = list->infos;
    const bool room = nn_reserve(&array, sizeof *list->infos, list->count, &list->capacity);
    list->infos = (nn_param_info *)array;
    if (!room) {
        nn_refuse(net, "nn: no memory for a param or buffer");
        return NULL;
    }
    nn_param_info *info = &list->infos[list->count++];
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%s", name);
    info->shape = shape;
    info->init = init;
    info->deviation = deviation;
    return info;
}

NN_API ms_tensor nn_param(nn_net *net, const char *name, ms_shape shape, nn_init_kind init,
                          float deviation) {
    const ms_tensor none = {0};
    nn_param_info *info = nn_append(net, &net->params, name, shape, init, deviation);
    if (info == NULL) {
        return none;
    }
    info->tensor = ms_param(net->model, name, MS_DTYPE_F32, shape);
    if (shape.rank == 1 && info->tensor.id != 0) {
        ms_set_weight_decay(net->model, info->tensor, 0.0f);
    }
    return info->tensor;
}

NN_API ms_tensor nn_buffer(nn_net *net, const char *name, ms_shape shape, nn_init_kind init) {
    const ms_tensor none = {0};
    nn_param_info *info = nn_append(net, &net->buffers, name, shape, init, 0.0f);
    if (info == NULL) {
        return none;
    }
    info->tensor = ms_buffer(net->model, name, MS_DTYPE_F32, shape);
    return info->tensor;
}

NN_API ms_tensor nn_param_in_blocks(nn_net *net, const char *name, blocks_kind kind, int64_t rows,
                                    int64_t columns, float deviation) {
    const ms_tensor none = {0};
    char reason[160];
    if (kind == BLOCKS_NONE || columns % blocks_length(kind) != 0) {
        snprintf(reason, sizeof reason,
                 "nn: %.60s: rows of %lld numbers are not whole blocks of %d", name,
                 (long long)columns, blocks_length(kind));
        return nn_refuse(net, reason);
    }
    nn_param_info *info =
        nn_append(net, &net->params, name, ms_shape2(rows, columns), NN_INIT_NORMAL, deviation);
    if (info == NULL) {
        return none;
    }
    info->blocks = kind;
    info->tensor =
        ms_param(net->model, name, MS_DTYPE_U8, ms_shape2(rows, blocks_row_bytes(kind, columns)));
    ms_set_frozen(net->model, info->tensor, true);
    return info->tensor;
}

NN_API ms_result nn_write_param(ms_model *model, const nn_param_info *info, const float *values) {
    if (info->blocks == BLOCKS_NONE) {
        return ms_write(model, info->tensor, values);
    }
    uint8_t *blocks = (uint8_t *)malloc((size_t)ms_tensor_bytes(model, info->tensor) + 1);
    if (blocks == NULL) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    blocks_encode(info->blocks, values, (int64_t)ms_shape_count(&info->shape), blocks);
    const ms_result result = ms_write(model, info->tensor, blocks);
    free(blocks);
    return result;
}

NN_API ms_result nn_read_param(ms_model *model, const nn_param_info *info, float *values) {
    if (info->blocks == BLOCKS_NONE) {
        return ms_read(model, info->tensor, values);
    }
    uint8_t *blocks = (uint8_t *)malloc((size_t)ms_tensor_bytes(model, info->tensor) + 1);
    if (blocks == NULL) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    const ms_result result = ms_read(model, info->tensor, blocks);
    if (result == MS_RESULT_OK) {
        blocks_decode(info->blocks, blocks, (int64_t)ms_shape_count(&info->shape), values);
    }
    free(blocks);
    return result;
}

/* The entry of a param in blocks; NULL: the tensor is none. */
NN_API const nn_param_info *nn_find_in_blocks(const nn_net *net, ms_tensor tensor) {
    const bool may_be = ms_tensor_dtype(net->model, tensor) == MS_DTYPE_U8;
    for (int64_t i = 0; i < net->params.count && may_be; i++) {
        const nn_param_info *info = &net->params.infos[i];
        if (info->blocks != BLOCKS_NONE && info->tensor.id == tensor.id) {
            return info;
        }
    }
    return NULL;
}

NN_API const nn_param_info *nn_list_at(const nn_list *list, int64_t index) {
    return index >= 0 && index < list->count ? &list->infos[index] : NULL;
}

NN_API const nn_param_info *nn_list_find(const nn_list *list, const char *name) {
    for (int64_t i = 0; i < list->count; i++) {
        if (strcmp(list->infos[i].name, name) == 0) {
            return &list->infos[i];
        }
    }
    return NULL;
}

NN_API int64_t nn_param_count(const nn_net *net) {
    return net->params.count;
}

NN_API const nn_param_info *nn_param_at(const nn_net *net, int64_t index) {
    return nn_list_at(&net->params, index);
}

NN_API const nn_param_info *nn_find_param(const nn_net *net, const char *name) {
    return nn_list_find(&net->params, name);
}

NN_API int64_t nn_buffer_count(const nn_net *net) {
    return net->buffers.count;
}

NN_API const nn_param_info *nn_buffer_at(const nn_net *net, int64_t index) {
    return nn_list_at(&net->buffers, index);
}

NN_API const nn_param_info *nn_find_buffer(const nn_net *net, const char *name) {
    return nn_list_find(&net->buffers, name);
}

NN_API uint64_t nn_list_largest(const nn_list *list) {
    uint64_t largest = 0;
    for (int64_t i = 0; i < list->count; i++) {
        const uint64_t count = ms_shape_count(&list->infos[i].shape);
        largest = count > largest ? count : largest;
    }
    return largest;
}

static const char nn_adapter_mark[] = ".adapter.";

NN_API bool nn_is_adapter(const nn_param_info *info) {
    return strstr(info->name, nn_adapter_mark) != NULL;
}

/* values has room for the largest tensor of the list. */
NN_API ms_result nn_init_list(nn_net *net, const nn_list *list, bool adapters_alone, float *values,
                              uint64_t seed) {
    ms_result result = MS_RESULT_OK;
    for (int64_t i = 0; i < list->count && result == MS_RESULT_OK; i++) {
        const nn_param_info *info = &list->infos[i];
        const int64_t count = (int64_t)ms_shape_count(&info->shape);
        if (adapters_alone && !nn_is_adapter(info)) {
            continue;
        }
        if (info->init == NN_INIT_NORMAL) {
            nn_normal_kernel(values, count, info->deviation, nn_mix(seed ^ nn_mix((uint64_t)i)));
        } else {
            nn_constant_kernel(values, count, info->init == NN_INIT_ONES ? 1.0f : 0.0f);
        }
        result = nn_write_param(net->model, info, values);
    }
    return result;
}

NN_API ms_result nn_init_some(nn_net *net, bool adapters_alone, uint64_t seed) {
    const uint64_t params = nn_list_largest(&net->params);
    const uint64_t buffers = nn_list_largest(&net->buffers);
    const uint64_t largest = params > buffers ? params : buffers;
    if (largest > SIZE_MAX / sizeof(float)) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    float *values = (float *)malloc((size_t)(largest + 1) * sizeof *values);
    if (values == NULL) {
        return MS_RESULT_OUT_OF_MEMORY;
    }
    ms_result result = nn_init_list(net, &net->params, adapters_alone, values, seed);
    if (result == MS_RESULT_OK) {
        result = nn_init_list(net, &net->buffers, adapters_alone, values, nn_mix(seed));
    }
    free(values);
    return result;
}

NN_API ms_result nn_init(nn_net *net, uint64_t seed) {
    return nn_init_some(net, false, seed);
}

NN_API ms_result nn_init_adapters(nn_net *net, uint64_t seed) {
    return nn_init_some(net, true, seed);
}

// ------------------------------------------------------------------------------------------------
// >>nn callbacks  from views to kernels

NN_API float *nn_floats(const ms_view *view) {
    return (float *)view->data;
}

NN_API int32_t *nn_integers(const ms_view *view) {
    return (int32_t *)view->data;
}

NN_API nn_values nn_values_of(const ms_view *view) {
    return nn_values_in(view->data, view->dtype);
}

NN_API nn_dest nn_gradient_of(const ms_view *view) {
    return nn_dest_of(nn_values_of(view), view->beta);
}

NN_API int64_t nn_count(const ms_view *view) {
    return (int64_t)ms_shape_count(&view->shape);
}

NN_API int64_t nn_last(ms_shape shape) {
    return shape.rank > 0 ? shape.dim[shape.rank - 1] : 1;
}

/* The product of all dims except the last. */
NN_API int64_t nn_rows(ms_shape shape) {
    return (int64_t)ms_shape_count(&shape) / nn_last(shape);
}

/* The product of the first dims. */
NN_API int64_t nn_leading(ms_shape shape, uint32_t dims) {
    int64_t product = 1;
    for (uint32_t i = 0; i < dims; i++) {
        product *= shape.dim[i];
    }
    return product;
}

NN_API const nn_device *nn_device_in(const ms_call *call) {
    return ((const nn_options *)call->user)->device;
}

/* For a call of so many elements. */
NN_API nn_seed nn_seed_of(const ms_call *call, int branch, int64_t elements) {
    nn_seed seed;
    seed.layer = call->layer_seed;
    seed.step = call->step_seed;
    seed.first = call->row_begin > 0 ? call->row_begin * (elements / call->row_count) : 0;
    seed.branch = branch;
    return seed;
}

typedef struct nn_embedding_options {
    nn_options common;
    bool has_positions, has_segments;
} nn_embedding_options;

/* Three lookups: tokens, positions, segments; one that the layer does not have has no entries. The
   ids are those of all rows, (B, T), also in a tile. */
NN_API void nn_lookups_of(const ms_call *call, nn_lookup lookups[3]) {
    const nn_embedding_options *o = (const nn_embedding_options *)call->user;
    const bool used[3] = {true, o->has_positions, o->has_segments};
    memset(lookups, 0, 3 * sizeof *lookups);
    for (int i = 0; i < 3; i++) {
        if (used[i]) {
            lookups[i].table = nn_values_of(&call->param[i]);
            lookups[i].entries = call->param[i].shape.dim[0];
            lookups[i].first = call->row_begin;
            lookups[i].period = nn_last(call->in[0].shape);
        }
    }
    lookups[0].index = nn_integers(&call->in[0]) + call->row_begin;
    lookups[2].index = used[2] ? nn_integers(&call->in[1]) + call->row_begin : NULL;
}

NN_API int nn_embedding_forward(const ms_call *call) {
    nn_lookup lookups[3];
    nn_lookups_of(call, lookups);
    return nn_device_in(call)->embedding(call, nn_values_of(&call->out[0]), lookups, 3,
                                         nn_rows(call->out[0].shape), nn_last(call->out[0].shape));
}

NN_API int nn_embedding_backward(const ms_call *call) {
    nn_lookup lookups[3];
    int result = 0;
    nn_lookups_of(call, lookups);
    for (int i = 0; i < 3 && result == 0; i++) {
        if (lookups[i].entries != 0) {
            result = nn_device_in(call)->embedding_backward(
                call, nn_gradient_of(&call->grad_param[i]), &lookups[i],
                nn_values_of(&call->grad_out[0]), nn_rows(call->grad_out[0].shape),
                nn_last(call->grad_out[0].shape), (float *)call->workspace);
        }
    }
    return result;
}

/* Of linear layers and convolutions. */
typedef struct nn_bias_options {
    nn_options common;
    bool biased;
} nn_bias_options;

NN_API const float *nn_bias_in(const ms_call *call) {
    const bool biased = ((const nn_bias_options *)call->user)->biased;
    return biased ? nn_floats(&call->param[1]) : NULL;
}

NN_API nn_dest nn_bias_gradient_in(const ms_call *call) {
    const bool biased = ((const nn_bias_options *)call->user)->biased;
    return biased ? nn_gradient_of(&call->grad_param[1]) : nn_nowhere();
}

NN_API nn_linear_size nn_linear_size_of(const ms_call *call) {
    nn_linear_size n;
    n.rows = nn_rows(call->in[0].shape);
    n.in = call->param[0].shape.dim[1];
    n.out = call->param[0].shape.dim[0];
    return n;
}

NN_API int nn_linear_forward(const ms_call *call) {
    return nn_device_in(call)->linear(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                      nn_values_of(&call->param[0]), nn_bias_in(call),
                                      nn_linear_size_of(call));
}

NN_API int nn_linear_backward(const ms_call *call) {
    return nn_device_in(call)->linear_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_bias_gradient_in(call), nn_values_of(&call->grad_out[0]), nn_values_of(&call->in[0]),
        nn_values_of(&call->param[0]), nn_linear_size_of(call), (float *)call->workspace);
}

/* Of layers whose first param is in blocks. */
typedef struct nn_coded_options {
    nn_options common;
    blocks_kind kind;
    int64_t columns;
    bool biased;
} nn_coded_options;

NN_API nn_coded nn_coded_in(const ms_call *call) {
    const nn_coded_options *o = (const nn_coded_options *)call->user;
    nn_coded coded;
    coded.blocks = (const uint8_t *)call->param[0].data;
    coded.kind = o->kind;
    coded.rows = call->param[0].shape.dim[0];
    coded.columns = o->columns;
    return coded;
}

/* Numbers that are decoded at a time, about. Tests, whose sizes are small, set it lower. */
#ifndef NN_DECODED
#define NN_DECODED (1 << 18)
#endif

/* Rows of a matrix that are decoded at a time. */
NN_API int64_t nn_decoded_rows(int64_t rows, int64_t columns) {
    return nn_least(rows, nn_most(1, NN_DECODED / columns));
}

/* The rows that a call works on, decoded at the start of its workspace. */
NN_API int nn_decode_rows(const ms_call *call, const nn_coded *w, int64_t first, int64_t count,
                          ms_dtype dtype, ms_matrix *floats) {
    const nn_values some = nn_values_in(call->workspace, dtype);
    *floats = nn_matrix(some, count, w->columns, w->columns);
    return nn_device_in(call)->decode(call, some, *w, NULL, first, count);
}

NN_API int nn_coded_embedding_forward(const ms_call *call) {
    return nn_device_in(call)->decode(call, nn_values_of(&call->out[0]), nn_coded_in(call),
                                      nn_integers(&call->in[0]) + call->row_begin, 0,
                                      nn_rows(call->out[0].shape));
}

/* Each row of y = the bias: that of a table with one entry. */
NN_API int nn_fill_with_bias(const ms_call *call, int64_t rows) {
    nn_lookup lookup;
    memset(&lookup, 0, sizeof lookup);
    lookup.table = nn_values_of(&call->param[1]);
    lookup.entries = lookup.period = 1;
    return nn_device_in(call)->embedding(call, nn_values_of(&call->out[0]), &lookup, 1, rows,
                                         nn_last(call->out[0].shape));
}

NN_API int nn_coded_linear_forward(const ms_call *call) {
    const nn_coded w = nn_coded_in(call);
    const nn_values x = nn_values_of(&call->in[0]), y = nn_values_of(&call->out[0]);
    const int64_t rows = nn_rows(call->in[0].shape), step = nn_decoded_rows(w.rows, w.columns);
    const bool biased = ((const nn_coded_options *)call->user)->biased;
    int result = biased ? nn_fill_with_bias(call, rows) : 0;
    for (int64_t first = 0; first < w.rows && result == 0; first += step) {
        const int64_t count = nn_least(step, w.rows - first);
        ms_matrix some;
        result = nn_decode_rows(call, &w, first, count, x.dtype, &some);
        result = nn_first(result, (int)ms_gemm(call, 1.0f, nn_matrix(x, rows, w.columns, w.columns),
                                               ms_transpose(some), biased ? 1.0f : 0.0f,
                                               nn_matrix(nn_from(y, first), rows, count, w.rows)));
    }
    return result;
}

/* dx = dy * weight, or += that, some rows of the weight at a time. The sum is F32: in 16 bits in scratch
   memory, and rounded once. */
NN_API int nn_coded_products(const ms_call *call, const nn_coded *w, float *sums) {
    const nn_values dy = nn_values_of(&call->grad_out[0]);
    const int64_t rows = nn_rows(call->in[0].shape), step = nn_decoded_rows(w->rows, w->columns);
    const ms_view *dx = &call->grad_in[0];
    const bool rounds = dx->dtype != MS_DTYPE_F32;
    ms_view sum = *dx;
    int result = 0;
    if (rounds) {
        sum.data = sums;
        sum.dtype = MS_DTYPE_F32;
        result = dx->beta != 0.0f ? (int)ms_cast(call, &sum, dx) : 0;
    }
    for (int64_t first = 0; first < w->rows && result == 0; first += step) {
        const int64_t count = nn_least(step, w->rows - first);
        ms_matrix some;
        result = nn_decode_rows(call, w, first, count, dy.dtype, &some);
        result = nn_first(
            result, (int)ms_gemm(call, 1.0f, nn_matrix(nn_from(dy, first), rows, count, w->rows),
                                 some, first == 0 ? dx->beta : 1.0f,
                                 nn_matrix(nn_values_of(&sum), rows, w->columns, w->columns)));
    }
    return nn_first(result, rounds && result == 0 ? (int)ms_cast(call, dx, &sum) : 0);
}

/* Its workspace: decoded rows, F32 sums of all rows of x, and what sums over columns need. */
NN_API int nn_coded_linear_backward(const ms_call *call) {
    const nn_coded w = nn_coded_in(call);
    const nn_dest dbias = ((const nn_coded_options *)call->user)->biased
                              ? nn_gradient_of(&call->grad_param[1])
                              : nn_nowhere();
    const nn_linear_size n = {nn_rows(call->in[0].shape), w.columns, w.rows};
    float *sums = (float *)call->workspace + nn_decoded_rows(w.rows, w.columns) * w.columns;
    int result = call->grad_in[0].data != NULL ? nn_coded_products(call, &w, sums) : 0;
    if (result == 0 && dbias.data != NULL) {
        result = nn_device_in(call)->linear_backward(call, nn_nowhere(), nn_nowhere(), dbias,
                                                     nn_values_of(&call->grad_out[0]), nn_f32(NULL),
                                                     nn_f32(NULL), n, sums + n.rows * w.columns);
    }
    return result;
}

typedef struct nn_norm_options {
    nn_options common;
    float epsilon;
} nn_norm_options;

NN_API nn_norm nn_norm_of(const ms_call *call) {
    nn_norm n;
    memset(&n, 0, sizeof n);
    n.rows = nn_rows(call->in[0].shape);
    n.width = nn_last(call->in[0].shape);
    n.weight = nn_floats(&call->param[0]);
    n.bias = nn_floats(&call->param[1]);
    n.mean = nn_floats(&call->saved[0]);
    n.rstd = nn_floats(&call->saved[1]);
    n.epsilon = ((const nn_norm_options *)call->user)->epsilon;
    return n;
}

NN_API int nn_layernorm_forward(const ms_call *call) {
    const nn_norm n = nn_norm_of(call);
    return nn_device_in(call)->layernorm(call, nn_values_of(&call->out[0]),
                                         nn_values_of(&call->in[0]), &n);
}

NN_API int nn_layernorm_backward(const ms_call *call) {
    const nn_norm n = nn_norm_of(call);
    return nn_device_in(call)->layernorm_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_gradient_of(&call->grad_param[1]), nn_values_of(&call->grad_out[0]),
        nn_values_of(&call->in[0]), &n, (float *)call->workspace);
}

typedef struct nn_rmsnorm_options {
    nn_options common;
    float epsilon;
    bool from_one;
    int64_t heads, kv_heads; // of nn_head_norm
} nn_rmsnorm_options;

/* A normalization of rows by the root of their mean square, by a param and with a saved tensor. */
NN_API nn_norm nn_rms_of(const ms_call *call, int slot, int64_t rows, int64_t width) {
    const nn_rmsnorm_options *o = (const nn_rmsnorm_options *)call->user;
    nn_norm n;
    memset(&n, 0, sizeof n);
    n.rows = rows;
    n.width = width;
    n.weight = nn_floats(&call->param[slot]);
    n.rstd = nn_floats(&call->saved[slot]);
    n.epsilon = o->epsilon;
    n.from_one = o->from_one;
    return n;
}

NN_API int nn_rmsnorm_forward(const ms_call *call) {
    const ms_shape shape = call->in[0].shape;
    const nn_norm n = nn_rms_of(call, 0, nn_rows(shape), nn_last(shape));
    return nn_device_in(call)->layernorm(call, nn_values_of(&call->out[0]),
                                         nn_values_of(&call->in[0]), &n);
}

NN_API int nn_rmsnorm_backward(const ms_call *call) {
    const ms_shape shape = call->in[0].shape;
    const nn_norm n = nn_rms_of(call, 0, nn_rows(shape), nn_last(shape));
    return nn_device_in(call)->layernorm_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]), nn_nowhere(),
        nn_values_of(&call->grad_out[0]), nn_values_of(&call->in[0]), &n, (float *)call->workspace);
}

/* The heads of queries (0) or keys (1) as rows. */
NN_API nn_norm nn_head_rows(const ms_call *call, int which) {
    const nn_rmsnorm_options *o = (const nn_rmsnorm_options *)call->user;
    const ms_shape shape = call->in[0].shape;
    const int64_t heads = which == 0 ? o->heads : o->kv_heads;
    nn_norm n = nn_rms_of(call, which, nn_rows(shape) * heads, nn_last(call->param[which].shape));
    n.places.group = heads;
    n.places.apart = nn_last(shape);
    return n;
}

/* The columns of values in qkv. */
NN_API nn_column_range nn_value_columns(const ms_call *call) {
    const nn_rmsnorm_options *o = (const nn_rmsnorm_options *)call->user;
    const int64_t size = nn_last(call->param[0].shape);
    nn_column_range c;
    c.first = (o->heads + o->kv_heads) * size;
    c.count = o->kv_heads * size;
    c.stride = nn_last(call->in[0].shape);
    return c;
}

NN_API int nn_head_norm_forward(const ms_call *call) {
    const nn_device *device = nn_device_in(call);
    const nn_values x = nn_values_of(&call->in[0]), y = nn_values_of(&call->out[0]);
    const nn_norm queries = nn_head_rows(call, 0), keys = nn_head_rows(call, 1);
    const int64_t first = queries.places.group * queries.width;
    int result = device->layernorm(call, y, x, &queries);
    result = nn_first(result, device->layernorm(call, nn_from(y, first), nn_from(x, first), &keys));
    return nn_first(result,
                    device->copy_columns(call, nn_dest_of(y, 0.0f), x, nn_rows(call->in[0].shape),
                                         nn_value_columns(call)));
}

NN_API int nn_head_norm_backward(const ms_call *call) {
    const nn_device *device = nn_device_in(call);
    const nn_dest dx = nn_gradient_of(&call->grad_in[0]);
    const nn_values x = nn_values_of(&call->in[0]), dy = nn_values_of(&call->grad_out[0]);
    int result = 0;
    int64_t first = 0;
    for (int i = 0; i < 2 && result == 0; i++) {
        const nn_norm n = nn_head_rows(call, i);
        const nn_values to = nn_values_at(dx);
        const nn_dest part =
            dx.data != NULL ? nn_dest_of(nn_from(to, first), dx.beta) : nn_nowhere();
        result = device->layernorm_backward(call, part, nn_gradient_of(&call->grad_param[i]),
                                            nn_nowhere(), nn_from(dy, first), nn_from(x, first), &n,
                                            (float *)call->workspace);
        first += n.places.group * n.width;
    }
    return nn_first(result, device->copy_columns(call, dx, dy, nn_rows(call->in[0].shape),
                                                 nn_value_columns(call)));
}

typedef struct nn_rotary_options {
    nn_options common;
    nn_turns turns; // without rows
} nn_rotary_options;

/* Of x (sequences, T, columns). */
NN_API nn_turns nn_turns_of(const ms_call *call, bool back) {
    const ms_shape shape = call->in[0].shape;
    nn_turns n = ((const nn_rotary_options *)call->user)->turns;
    n.rows = nn_rows(shape);
    n.columns = nn_last(shape);
    n.period = shape.dim[1];
    n.back = back;
    return n;
}

/* Turns the pairs of all heads and copies what is in none: the ends of heads, and what comes after
   them. */
NN_API int nn_turn(const ms_call *call, nn_dest y, nn_values x, bool back) {
    const nn_device *device = nn_device_in(call);
    const nn_turns n = nn_turns_of(call, back);
    nn_column_range rest;
    rest.first = n.heads * n.size;
    rest.count = n.columns - rest.first;
    rest.stride = n.columns;
    int result = device->rotary(call, y, x, &n);
    result = nn_first(result, device->copy_columns(call, y, x, n.rows, rest));
    rest.count = n.size - 2 * n.pairs;
    for (int64_t head = 0; head < n.heads && rest.count > 0; head++) {
        rest.first = head * n.size + 2 * n.pairs;
        result = nn_first(result, device->copy_columns(call, y, x, n.rows, rest));
    }
    return result;
}

NN_API int nn_rotary_forward(const ms_call *call) {
    return nn_turn(call, nn_dest_of(nn_values_of(&call->out[0]), 0.0f), nn_values_of(&call->in[0]),
                   false);
}

NN_API int nn_rotary_backward(const ms_call *call) {
    return nn_turn(call, nn_gradient_of(&call->grad_in[0]), nn_values_of(&call->grad_out[0]), true);
}

typedef struct nn_gated_options {
    nn_options common;
    nn_gate kind;
} nn_gated_options;

NN_API int nn_gated_forward(const ms_call *call) {
    return nn_device_in(call)->gated(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                     nn_values_of(&call->in[1]), nn_count(&call->in[0]),
                                     ((const nn_gated_options *)call->user)->kind);
}

NN_API int nn_gated_backward(const ms_call *call) {
    return nn_device_in(call)->gated_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_in[1]),
        nn_values_of(&call->grad_out[0]), nn_values_of(&call->in[0]), nn_values_of(&call->in[1]),
        nn_count(&call->in[0]), ((const nn_gated_options *)call->user)->kind);
}

/* The factor of nn_scale, the cap of nn_softcap. */
typedef struct nn_scale_options {
    nn_options common;
    float factor;
} nn_scale_options;

NN_API int nn_scale_forward(const ms_call *call) {
    return nn_device_in(call)->scale(call, nn_dest_of(nn_values_of(&call->out[0]), 0.0f),
                                     nn_values_of(&call->in[0]), nn_count(&call->in[0]),
                                     ((const nn_scale_options *)call->user)->factor);
}

NN_API int nn_scale_backward(const ms_call *call) {
    return nn_device_in(call)->scale(call, nn_gradient_of(&call->grad_in[0]),
                                     nn_values_of(&call->grad_out[0]), nn_count(&call->grad_out[0]),
                                     ((const nn_scale_options *)call->user)->factor);
}

NN_API int nn_softcap_forward(const ms_call *call) {
    return nn_device_in(call)->softcap(call, nn_values_of(&call->out[0]),
                                       nn_values_of(&call->in[0]), nn_count(&call->in[0]),
                                       ((const nn_scale_options *)call->user)->factor);
}

NN_API int nn_softcap_backward(const ms_call *call) {
    return nn_device_in(call)->softcap_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_values_of(&call->grad_out[0]),
        nn_values_of(&call->out[0]), nn_count(&call->out[0]),
        ((const nn_scale_options *)call->user)->factor);
}

typedef struct nn_gelu_options {
    nn_options common;
    bool erf_form;
} nn_gelu_options;

NN_API int nn_gelu_forward(const ms_call *call) {
    return nn_device_in(call)->gelu(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                    nn_count(&call->in[0]),
                                    ((const nn_gelu_options *)call->user)->erf_form);
}

NN_API int nn_gelu_backward(const ms_call *call) {
    return nn_device_in(call)->gelu_backward(call, nn_gradient_of(&call->grad_in[0]),
                                             nn_values_of(&call->grad_out[0]),
                                             nn_values_of(&call->in[0]), nn_count(&call->in[0]),
                                             ((const nn_gelu_options *)call->user)->erf_form);
}

NN_API int nn_add_forward(const ms_call *call) {
    return nn_device_in(call)->add(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                   nn_values_of(&call->in[1]), nn_count(&call->out[0]));
}

NN_API int nn_add_backward(const ms_call *call) {
    int result = 0;
    for (int i = 0; i < 2; i++) {
        result = nn_first(result, nn_device_in(call)->copy(call, nn_gradient_of(&call->grad_in[i]),
                                                           nn_values_of(&call->grad_out[0]),
                                                           nn_count(&call->grad_out[0])));
    }
    return result;
}

typedef struct nn_dropout_options {
    nn_options common;
    float probability;
} nn_dropout_options;

NN_API int nn_dropout_forward(const ms_call *call) {
    const nn_dest out = nn_dest_of(nn_values_of(&call->out[0]), 0.0f);
    const nn_values x = nn_values_of(&call->in[0]);
    const int64_t count = nn_count(&call->in[0]);
    if (call->phase == MS_PHASE_EVAL) {
        return nn_device_in(call)->copy(call, out, x, count);
    }
    return nn_device_in(call)->dropout(call, out, x, count,
                                       ((const nn_dropout_options *)call->user)->probability,
                                       nn_seed_of(call, -1, count));
}

NN_API int nn_dropout_backward(const ms_call *call) {
    const int64_t count = nn_count(&call->grad_out[0]);
    return nn_device_in(call)->dropout(
        call, nn_gradient_of(&call->grad_in[0]), nn_values_of(&call->grad_out[0]), count,
        ((const nn_dropout_options *)call->user)->probability, nn_seed_of(call, -1, count));
}

/* What an attention is, without the sizes of the batch. */
typedef struct nn_attention_options {
    nn_options common;
    nn_attention_size size; // batch and sequence are those of the call
} nn_attention_options;

/* The sizes for rows of this shape (B, T, ...). */
NN_API nn_attention_size nn_attention_size_of(nn_attention_size n, ms_shape rows) {
    n.batch = rows.dim[0];
    n.sequence = rows.dim[1];
    return n;
}

/* An attention of heads that share no keys, without a window or a cap. */
NN_API nn_attention_size nn_plain_attention(int64_t heads, int64_t size, bool causal) {
    nn_attention_size n;
    memset(&n, 0, sizeof n);
    n.heads = heads;
    n.kv_heads = heads;
    n.size = size;
    n.scale = 1.0f / sqrtf((float)size);
    n.causal = causal;
    return n;
}

NN_API nn_attention_size nn_attention_size_in(const ms_call *call) {
    const nn_attention_options *options = (const nn_attention_options *)call->user;
    return nn_attention_size_of(options->size, call->in[0].shape);
}

/* That saves its probabilities. */
NN_API int nn_attention_forward(const ms_call *call) {
    return nn_device_in(call)->attention(call, nn_values_of(&call->out[0]),
                                         nn_values_of(&call->saved[0]), nn_values_of(&call->in[0]),
                                         (float *)call->workspace, nn_attention_size_in(call));
}

NN_API int nn_attention_backward(const ms_call *call) {
    return nn_device_in(call)->attention_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_values_of(&call->grad_out[0]),
        nn_values_of(&call->saved[0]), nn_values_of(&call->in[0]), (float *)call->workspace,
        nn_attention_size_in(call));
}

NN_API int nn_tiled_attention_forward(const ms_call *call) {
    return nn_device_in(call)->tiled_attention(
        call, nn_values_of(&call->out[0]), nn_floats(&call->saved[0]), nn_values_of(&call->in[0]),
        (float *)call->workspace, nn_attention_size_in(call));
}

NN_API int nn_tiled_attention_backward(const ms_call *call) {
    return nn_device_in(call)->tiled_attention_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_values_of(&call->grad_out[0]),
        nn_values_of(&call->out[0]), nn_floats(&call->saved[0]), nn_values_of(&call->in[0]),
        (float *)call->workspace, nn_attention_size_in(call));
}

NN_API int nn_cross_entropy_forward(const ms_call *call) {
    return nn_device_in(call)->cross_entropy(
        call, nn_floats(&call->out[0]), nn_floats(&call->saved[0]), nn_values_of(&call->in[0]),
        nn_integers(&call->in[1]), nn_count(&call->in[1]), nn_last(call->in[0].shape));
}

NN_API int nn_cross_entropy_backward(const ms_call *call) {
    return nn_device_in(call)->cross_entropy_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_floats(&call->grad_out[0]),
        nn_floats(&call->saved[0]), nn_values_of(&call->in[0]), nn_integers(&call->in[1]),
        nn_count(&call->in[1]), nn_last(call->in[0].shape));
}

NN_API int nn_relu_forward(const ms_call *call) {
    return nn_device_in(call)->relu(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                    nn_count(&call->in[0]));
}

NN_API int nn_relu_backward(const ms_call *call) {
    return nn_device_in(call)->relu_backward(call, nn_gradient_of(&call->grad_in[0]),
                                             nn_values_of(&call->grad_out[0]),
                                             nn_values_of(&call->out[0]), nn_count(&call->out[0]));
}

/* (B, C, ...): all dims after the channels make up the plane. */
NN_API nn_planes nn_planes_of(ms_shape shape) {
    nn_planes n;
    n.images = shape.dim[0];
    n.channels = shape.dim[1];
    n.plane = (int64_t)ms_shape_count(&shape) / (n.images * n.channels);
    return n;
}

typedef struct nn_window_options {
    nn_bias_options bias;
    int64_t kernel, stride, padding;
} nn_window_options;

NN_API nn_window nn_window_in(const ms_call *call) {
    const nn_window_options *o = (const nn_window_options *)call->user;
    return nn_window_of(call->in[0].shape, o->kernel, o->stride, o->padding);
}

NN_API int nn_conv2d_forward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->conv2d(call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]),
                                      nn_values_of(&call->param[0]), nn_bias_in(call),
                                      call->param[0].shape.dim[0], &w, (float *)call->workspace);
}

NN_API int nn_conv2d_backward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->conv2d_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_bias_gradient_in(call), nn_values_of(&call->grad_out[0]), nn_values_of(&call->in[0]),
        nn_values_of(&call->param[0]), call->param[0].shape.dim[0], &w, (float *)call->workspace);
}

NN_API int nn_max_pool_forward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->max_pool(call, nn_values_of(&call->out[0]),
                                        nn_integers(&call->saved[0]), nn_values_of(&call->in[0]),
                                        &w);
}

NN_API int nn_max_pool_backward(const ms_call *call) {
    const nn_window w = nn_window_in(call);
    return nn_device_in(call)->max_pool_backward(call, nn_gradient_of(&call->grad_in[0]),
                                                 nn_values_of(&call->grad_out[0]),
                                                 nn_integers(&call->saved[0]), &w);
}

typedef struct nn_batch_norm_options {
    nn_options common;
    float epsilon, momentum;
} nn_batch_norm_options;

NN_API nn_batch_norm_values nn_batch_norm_values_of(const ms_call *call, nn_moments moments) {
    const nn_batch_norm_options *o = (const nn_batch_norm_options *)call->user;
    nn_batch_norm_values v;
    memset(&v, 0, sizeof v);
    v.moments = moments;
    v.weight = nn_floats(&call->param[0]);
    v.bias = nn_floats(&call->param[1]);
    v.mean = nn_floats(&call->saved[0]);
    v.rstd = nn_floats(&call->saved[1]);
    v.epsilon = o->epsilon;
    v.momentum = o->momentum;
    if (call->phase == MS_PHASE_FORWARD || call->phase == MS_PHASE_EVAL) {
        v.running_mean = nn_floats(&call->state[0]);
        v.running_variance = nn_floats(&call->state[1]);
    }
    return v;
}

NN_API int nn_batch_norm_forward(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(
        call, call->phase == MS_PHASE_EVAL ? NN_MOMENTS_RUNNING : NN_MOMENTS_OF_BATCH);
    return nn_device_in(call)->batch_norm(
        call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]), &v,
        nn_planes_of(call->in[0].shape), (float *)call->workspace);
}

NN_API int nn_batch_norm_recompute(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(call, NN_MOMENTS_SAVED);
    return nn_device_in(call)->batch_norm(
        call, nn_values_of(&call->out[0]), nn_values_of(&call->in[0]), &v,
        nn_planes_of(call->in[0].shape), (float *)call->workspace);
}

NN_API int nn_batch_norm_backward(const ms_call *call) {
    const nn_batch_norm_values v = nn_batch_norm_values_of(call, NN_MOMENTS_SAVED);
    return nn_device_in(call)->batch_norm_backward(
        call, nn_gradient_of(&call->grad_in[0]), nn_gradient_of(&call->grad_param[0]),
        nn_gradient_of(&call->grad_param[1]), nn_values_of(&call->grad_out[0]),
        nn_values_of(&call->in[0]), &v, nn_planes_of(call->in[0].shape), (float *)call->workspace);
}

NN_API int nn_average_pool_forward(const ms_call *call) {
    return nn_device_in(call)->average(call, nn_values_of(&call->out[0]),
                                       nn_values_of(&call->in[0]), nn_planes_of(call->in[0].shape));
}

NN_API int nn_average_pool_backward(const ms_call *call) {
    return nn_device_in(call)->average_backward(call, nn_gradient_of(&call->grad_in[0]),
                                                nn_values_of(&call->grad_out[0]),
                                                nn_planes_of(call->in[0].shape));
}

NN_API int nn_flatten_forward(const ms_call *call) {
    return nn_device_in(call)->copy(call, nn_dest_of(nn_values_of(&call->out[0]), 0.0f),
                                    nn_values_of(&call->in[0]), nn_count(&call->in[0]));
}

NN_API int nn_flatten_backward(const ms_call *call) {
    return nn_device_in(call)->copy(call, nn_gradient_of(&call->grad_in[0]),
                                    nn_values_of(&call->grad_out[0]), nn_count(&call->grad_out[0]));
}

// ------------------------------------------------------------------------------------------------
// >>nn layers  the functions that register them

NN_API ms_layer_desc nn_desc(const char *name, ms_layer_fn forward, ms_layer_fn backward,
                             void *options) {
    ms_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.name = name;
    desc.forward = forward;
    desc.backward = backward;
    desc.user = options;
    return desc;
}

/* Refuses a layer if an operand has a format that no kernel reads as values; false: it has. */
NN_API bool nn_check_formats(nn_net *net, const char *layer, const ms_tensor *operands,
                             uint32_t integers) {
    for (uint32_t i = 0; i < MS_LIMIT_IN && operands[i].id != 0; i++) {
        const ms_dtype dtype = ms_tensor_dtype(net->model, operands[i]);
        if ((integers >> i & 1) == 0 && !nn_has_format(dtype)) {
            char reason[160];
            snprintf(reason, sizeof reason,
                     "nn: layer %.40s: %.40s has the dtype %s, not f32, bf16 or f16", layer,
                     ms_tensor_name(net->model, operands[i]), ms_dtype_name(dtype));
            nn_refuse(net, reason);
            return false;
        }
    }
    return true;
}

/* Registers desc with a new activation of this shape as its only output. The inputs in the mask
   `integers` are numbers of rows, the params in the mask `coded` are in blocks. */
NN_API ms_tensor nn_register_coded(nn_net *net, ms_layer_desc *desc, ms_shape shape,
                                   uint32_t integers, uint32_t coded) {
    const ms_tensor nothing = {0};
    if (!nn_check_formats(net, desc->name, desc->in, integers) ||
        !nn_check_formats(net, desc->name, desc->param, coded)) {
        return nothing;
    }
    desc->out[0] = ms_activation(net->model, desc->name, MS_DTYPE_F32, shape);
    desc->dtypes.accepts = 1u << MS_DTYPE_BF16 | 1u << MS_DTYPE_F16;
    const bool in_tiles = net->tile_rows > 0 && nn_leading(shape, desc->tile.axes) > 1;
    if (in_tiles) {
        desc->tile.preferred = net->tile_rows;
        desc->tile.smallest = nn_least(desc->tile.smallest, net->tile_rows);
    }
    const ms_layer none = {0};
    const ms_layer layer = desc->user != NULL ? ms_register_layer(net->model, desc) : none;
    if (layer.id && net->forces_half) {
        ms_set_layer_technique(net->model, layer, MS_TECHNIQUE_MIXED_PRECISION, MS_SWITCH_ON);
    }
    if (layer.id && in_tiles) {
        ms_set_layer_technique(net->model, layer, MS_TECHNIQUE_TILING, MS_SWITCH_ON);
    }
    return desc->out[0];
}

NN_API ms_tensor nn_register_indexed(nn_net *net, ms_layer_desc *desc, ms_shape shape,
                                     uint32_t integers) {
    return nn_register_coded(net, desc, shape, integers, 0);
}

NN_API ms_tensor nn_register(nn_net *net, ms_layer_desc *desc, ms_shape shape) {
    return nn_register_indexed(net, desc, shape, 0);
}

enum { NN_TILE_ROWS = 64 }; // of a linear layer: with fewer, a product waits for its weight

/* Says that the rows of a layer are independent: its first dims, but not the last one. Of a sequence
   that is a token, of images that is one of them. */
NN_API void nn_declare_rows(ms_layer_desc *desc, ms_shape out) {
    desc->tile.axes = out.rank == 3 ? 2 : out.rank > 1 ? 1 : 0;
}

/* A workspace of this many floats. */
NN_API ms_workspace nn_workspace(int64_t floats) {
    ms_workspace workspace;
    memset(&workspace, 0, sizeof workspace);
    workspace.bytes = (uint64_t)floats * sizeof(float);
    return workspace;
}

/* What the scratch memory of a layer depends on, beside its rows: the largest sizes. */
typedef struct nn_scratch {
    int64_t (*floats)(const struct nn_scratch *scratch, int64_t rows);
    const nn_device *device;
    int64_t rows;           // of the layer
    int64_t inner, columns; // rows of sums over columns for each of these, and the columns
    nn_attention_size attention;
    nn_window window;
    bool keeps_scores, backward;
} nn_scratch;

enum { NN_MOST_ROWS = 1 << 16, NN_TIGHT = 16 };

/* The workspace of a layer. Where floats grows with the rows in a straight line, up to a NN_TIGHT-th
   of it, a tile of the layer takes less. */
NN_API ms_workspace nn_workspace_by_rows(const nn_scratch *scratch) {
    const int64_t rows = scratch->rows;
    const int64_t all = scratch->floats(scratch, rows);
    if (rows < 2 || rows > NN_MOST_ROWS) {
        return nn_workspace(all);
    }
    const int64_t slope = (all - scratch->floats(scratch, 1)) / (rows - 1);
    int64_t least = 0;
    for (int64_t r = 1; r <= rows && slope > 0; r++) {
        least = nn_most(least, scratch->floats(scratch, r) - slope * r);
    }
    if (slope < 1 || least + slope * rows > all + all / NN_TIGHT) {
        return nn_workspace(all);
    }
    ms_workspace workspace = nn_workspace(least);
    workspace.row_bytes = (uint64_t)slope * sizeof(float);
    return workspace;
}

NN_API int64_t nn_column_scratch(const nn_scratch *s, int64_t rows) {
    return s->device->column_floats(rows * s->inner, s->columns);
}

NN_API int64_t nn_layernorm_scratch(const nn_scratch *s, int64_t rows) {
    return s->device->layernorm_floats(rows * s->inner, s->columns);
}

/* The workspace for sums over the columns of a layer whose output has this shape, at its largest. */
NN_API ms_workspace nn_column_workspace(const nn_net *net, ms_shape out, uint32_t axes,
                                        int64_t (*floats)(const nn_scratch *s, int64_t rows)) {
    nn_scratch s;
    memset(&s, 0, sizeof s);
    s.floats = floats;
    s.device = net->device;
    s.columns = nn_last(out);
    s.rows = nn_leading(out, axes);
    s.inner = nn_rows(out) / s.rows;
    return nn_workspace_by_rows(&s);
}

NN_API double nn_elements(ms_shape shape) {
    return (double)ms_shape_count(&shape);
}

/* The shape with another last dim, along no axis. */
NN_API ms_shape nn_with_last(ms_shape shape, int64_t last) {
    if (shape.rank > 0) {
        shape.dim[shape.rank - 1] = last;
        shape.axes[shape.rank - 1] = 0;
    }
    return shape;
}

/* The axes that the dims begin ... end - 1 lie along. */
NN_API uint8_t nn_axes(ms_shape shape, int32_t begin, int32_t end) {
    unsigned axes = 0;
    for (int32_t i = begin; i < end; i++) {
        axes |= shape.axes[i];
    }
    return (uint8_t)axes;
}

/* How many leading dims of x have together as many rows as the first dims of another shape, also
   when an axis changes its size; 0: there are none. */
NN_API uint8_t nn_row_dims(ms_shape x, ms_shape other, uint32_t dims) {
    for (int32_t i = 1; i <= x.rank && dims > 0; i++) {
        if (nn_leading(x, (uint32_t)i) == nn_leading(other, dims) &&
            nn_axes(x, 0, i) == nn_axes(other, 0, (int32_t)dims)) {
            return (uint8_t)i;
        }
    }
    return 0;
}

/* (rows, columns) with the rows of a shape, along all axes of its dims except the last. */
NN_API ms_shape nn_per_row(ms_shape shape, int64_t columns) {
    ms_shape rows = ms_shape2(nn_rows(shape), columns);
    rows.axes[0] = nn_axes(shape, 0, shape.rank - 1);
    return rows;
}

/* Whether both have the same count of elements, and keep it when an axis changes its size. */
NN_API bool nn_counts_match(ms_shape a, ms_shape b) {
    return ms_shape_count(&a) == ms_shape_count(&b) &&
           nn_axes(a, 0, a.rank) == nn_axes(b, 0, b.rank);
}

/* The shape when all its axes have their largest sizes. */
NN_API ms_shape nn_largest(const nn_net *net, ms_shape shape) {
    for (int32_t i = 0; i < shape.rank; i++) {
        for (int a = 0; a < MS_LIMIT_AXES; a++) {
            if ((shape.axes[i] >> a & 1) != 0 && net->axis_size[a] != 0) {
                shape.dim[i] = shape.dim[i] / net->axis_size[a] * net->axis_largest[a];
            }
        }
    }
    return shape;
}

/* Options of a layer whose weight or table is in blocks. */
NN_API void *nn_attach_coded(nn_net *net, const nn_param_info *weight, bool biased) {
    nn_coded_options options;
    memset(&options, 0, sizeof options);
    options.kind = weight->blocks;
    options.columns = weight->shape.dim[1];
    options.biased = biased;
    return nn_attach(net, &options, sizeof options);
}

/* Nothing flows back: the table is frozen. */
NN_API ms_tensor nn_coded_embedding(nn_net *net, const char *name, ms_tensor tokens,
                                    const nn_param_info *table) {
    ms_layer_desc desc =
        nn_desc(name, nn_coded_embedding_forward, NULL, nn_attach_coded(net, table, false));
    ms_shape out = ms_tensor_shape(net->model, tokens);
    desc.in[0] = tokens;
    desc.param[0] = table->tensor;
    desc.no_backward = true;
    out.rank = 3;
    out = nn_with_last(out, table->shape.dim[1]);
    desc.flops = 2.0 * nn_elements(out);
    nn_declare_rows(&desc, out);
    desc.tile.whole_in = 1;
    return nn_register_coded(net, &desc, out, 1, 1);
}

NN_API ms_tensor nn_embedding(nn_net *net, const char *name, ms_tensor tokens, ms_tensor table,
                              ms_tensor positions, ms_tensor segments, ms_tensor segment_table) {
    const ms_shape ids = ms_tensor_shape(net->model, tokens);
    const bool segmented = segments.id != 0 && segment_table.id != 0;
    if (ids.rank != 2) {
        return nn_refuse(net, "nn_embedding: tokens must be (B, T)");
    }
    const nn_param_info *coded = nn_find_in_blocks(net, table);
    if (coded != NULL) {
        return positions.id == 0 && !segmented
                   ? nn_coded_embedding(net, name, tokens, coded)
                   : nn_refuse(net, "nn_embedding: a table in blocks, with positions or segments");
    }
    if (positions.id != 0 &&
        ms_tensor_shape(net->model, positions).dim[0] < nn_largest(net, ids).dim[1]) {
        return nn_refuse(net, "nn_embedding: fewer positions than T");
    }
    nn_embedding_options options;
    memset(&options, 0, sizeof options);
    options.has_positions = positions.id != 0;
    options.has_segments = segmented;
    ms_layer_desc desc = nn_desc(name, nn_embedding_forward, nn_embedding_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = tokens;
    desc.param[0] = table;
    desc.param[1] = positions;
    desc.backward_reads.in = 1;
    if (segmented) {
        desc.in[1] = segments;
        desc.param[2] = segment_table;
        desc.backward_reads.in = 3;
    }
    ms_shape out = ids;
    out.rank = 3;
    out = nn_with_last(out, nn_last(ms_tensor_shape(net->model, table)));
    desc.flops = nn_elements(out) * ((positions.id != 0) + (segmented ? 2.0 : 1.0));
    desc.backward_flops = desc.flops;
    desc.dtypes.half_gradients = net->half_gradients ? MS_ALL_SLOTS : 0;
    nn_declare_rows(&desc, out);
    desc.backward_workspace =
        nn_column_workspace(net, nn_largest(net, out), desc.tile.axes, nn_column_scratch);
    desc.tile.whole_in = segmented ? 3 : 1; // their shape has T, of which positions are
    return nn_register_indexed(net, &desc, out, desc.tile.whole_in);
}

/* The mask of slots of params that stay F32, in a layer whose params are a weight and this bias, if
   it has one. */
NN_API uint32_t nn_bias_mask(ms_tensor bias) {
    return bias.id != 0 ? 2 : 0;
}

/* The workspace for some decoded rows and, in backward, for what nn_coded_linear_backward has after them:
   F32 sums for each row of the layer, and the scratch memory of sums over columns. */
NN_API ms_workspace nn_coded_workspace(const nn_net *net, const nn_param_info *weight, ms_shape out,
                                       uint32_t axes, bool backward) {
    const int64_t columns = weight->shape.dim[1];
    const int64_t numbers = nn_decoded_rows(weight->shape.dim[0], columns) * columns;
    const ms_shape largest = nn_largest(net, out);
    if (!backward) {
        return nn_workspace(numbers);
    }
    ms_workspace workspace = nn_column_workspace(net, largest, axes, nn_column_scratch);
    const int64_t units = axes > 0 ? nn_leading(largest, axes) : 1; // what row_bytes is for
    const uint64_t sums = (uint64_t)(nn_rows(largest) / units * columns) * sizeof(float);
    workspace.row_bytes += axes > 0 ? sums : 0;
    workspace.bytes += (uint64_t)numbers * sizeof(float) + (axes > 0 ? 0 : sums);
    return workspace;
}

NN_API ms_tensor nn_coded_linear(nn_net *net, const char *name, ms_tensor x,
                                 const nn_param_info *weight, ms_tensor bias) {
    const ms_shape from = ms_tensor_shape(net->model, x);
    if (from.rank < 1 || weight->shape.dim[1] != nn_last(from)) {
        return nn_refuse(net, "nn_linear: the weight does not fit the input");
    }
    ms_layer_desc desc = nn_desc(name, nn_coded_linear_forward, nn_coded_linear_backward,
                                 nn_attach_coded(net, weight, bias.id != 0));
    desc.in[0] = x;
    desc.param[0] = weight->tensor;
    desc.param[1] = bias;
    desc.backward_reads.param = 1;
    const ms_shape out = nn_with_last(from, weight->shape.dim[0]);
    const double elements = nn_elements(weight->shape); // which are decoded: some 4 operations each
    desc.flops = nn_elements(out) * 2.0 * (double)weight->shape.dim[1] + 4.0 * elements;
    desc.backward_flops = desc.flops; // there is no gradient of the weight
    nn_declare_rows(&desc, out);
    desc.forward_workspace = nn_coded_workspace(net, weight, out, desc.tile.axes, false);
    desc.backward_workspace = nn_coded_workspace(net, weight, out, desc.tile.axes, true);
    desc.tile.smallest = out.rank == 3 ? NN_TILE_ROWS : 0;
    return nn_register_coded(net, &desc, out, 0, 1);
}

NN_API ms_tensor nn_linear_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias) {
    const nn_param_info *coded = nn_find_in_blocks(net, weight);
    if (coded != NULL) {
        return nn_coded_linear(net, name, x, coded, bias);
    }
    const ms_shape from = ms_tensor_shape(net->model, x);
    const ms_shape matrix = ms_tensor_shape(net->model, weight);
    if (from.rank < 1 || matrix.rank != 2 || matrix.dim[1] != nn_last(from)) {
        return nn_refuse(net, "nn_linear: the weight does not fit the input");
    }
    nn_bias_options options;
    memset(&options, 0, sizeof options);
    options.biased = bias.id != 0;
    ms_layer_desc desc = nn_desc(name, nn_linear_forward, nn_linear_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 1;
    desc.dtypes.f32_param = nn_bias_mask(bias);
    desc.dtypes.half_gradients = net->half_gradients ? 1 : 0;
    const ms_shape out = nn_with_last(from, matrix.dim[0]);
    desc.flops = nn_elements(out) * 2.0 * (double)matrix.dim[1];
    nn_declare_rows(&desc, out);
    desc.backward_workspace =
        nn_column_workspace(net, nn_largest(net, out), desc.tile.axes, nn_column_scratch);
    desc.tile.smallest = out.rank == 3 ? NN_TILE_ROWS : 0;
    return nn_register(net, &desc, out);
}

/* weight and bias of a linear layer, or of a normalization. */
typedef struct nn_pair {
    ms_tensor weight, bias;
} nn_pair;

NN_API nn_pair nn_linear_params(nn_net *net, const char *name, int64_t in, int64_t out,
                                float deviation) {
    nn_pair pair;
    pair.weight =
        nn_param(net, nn_join(name, "weight").text, ms_shape2(out, in), NN_INIT_NORMAL, deviation);
    pair.bias = nn_param(net, nn_join(name, "bias").text, ms_shape1(out), NN_INIT_ZEROS, 0.0f);
    return pair;
}

NN_API nn_pair nn_layernorm_params(nn_net *net, const char *name, int64_t width) {
    nn_pair pair;
    pair.weight = nn_param(net, nn_join(name, "weight").text, ms_shape1(width), NN_INIT_ONES, 0.0f);
    pair.bias = nn_param(net, nn_join(name, "bias").text, ms_shape1(width), NN_INIT_ZEROS, 0.0f);
    return pair;
}

NN_API ms_tensor nn_linear(nn_net *net, const char *name, ms_tensor x, int64_t out_features,
                           float deviation) {
    const nn_pair pair = nn_linear_params(net, name, nn_last(ms_tensor_shape(net->model, x)),
                                          out_features, deviation);
    return nn_linear_tied(net, name, x, pair.weight, pair.bias);
}

NN_API ms_tensor nn_saved(nn_net *net, const char *name, const char *suffix, ms_shape shape) {
    return ms_saved(net->model, nn_join(name, suffix).text, MS_DTYPE_F32, shape);
}

NN_API ms_tensor nn_layernorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                   ms_tensor bias, float epsilon) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    const ms_tensor none = {0};
    if (shape.rank < 1 || nn_last(ms_tensor_shape(net->model, weight)) != nn_last(shape)) {
        return nn_refuse(net, "nn_layernorm: the weight does not fit the input");
    }
    if (!nn_check_width(net, name, nn_last(shape))) {
        return none;
    }
    nn_norm_options options;
    memset(&options, 0, sizeof options);
    options.epsilon = epsilon;
    ms_layer_desc desc = nn_desc(name, nn_layernorm_forward, nn_layernorm_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.saved[0] = nn_saved(net, name, "mean", nn_per_row(shape, 1));
    desc.saved[1] = nn_saved(net, name, "rstd", nn_per_row(shape, 1));
    desc.dtypes.f32_saved = 3;
    desc.dtypes.f32_param = 3;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 3;
    desc.backward_reads.param = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 8.0;
    nn_declare_rows(&desc, shape);
    desc.backward_workspace =
        nn_column_workspace(net, nn_largest(net, shape), desc.tile.axes, nn_layernorm_scratch);
    desc.tile.saved_axes[0] = desc.tile.saved_axes[1] = desc.tile.axes > 0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_layernorm(nn_net *net, const char *name, ms_tensor x) {
    const nn_pair pair = nn_layernorm_params(net, name, nn_last(ms_tensor_shape(net->model, x)));
    return nn_layernorm_tied(net, name, x, pair.weight, pair.bias, 1e-5f);
}

/* The workspace of backward for the sums over rows of a normalization, `inner` of them to each of so
   many tokens. */
NN_API ms_workspace nn_norm_workspace(const nn_net *net, ms_shape shape, uint32_t axes,
                                      int64_t inner, int64_t width) {
    const ms_shape largest = nn_largest(net, shape);
    nn_scratch s;
    memset(&s, 0, sizeof s);
    s.floats = nn_layernorm_scratch;
    s.device = net->device;
    s.columns = width;
    s.rows = nn_leading(largest, axes);
    s.inner = nn_rows(largest) / s.rows * inner;
    return nn_workspace_by_rows(&s);
}

/* What the two kinds of nn_rmsnorm have in common. */
NN_API ms_layer_desc nn_rmsnorm_desc(nn_net *net, const char *name, ms_layer_fn forward,
                                     ms_layer_fn backward, const nn_rmsnorm_options *options) {
    ms_layer_desc desc = nn_desc(name, forward, backward, nn_attach(net, options, sizeof *options));
    desc.dtypes.f32_saved = MS_ALL_SLOTS;
    desc.dtypes.f32_param = MS_ALL_SLOTS;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = MS_ALL_SLOTS;
    desc.backward_reads.param = MS_ALL_SLOTS;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    return desc;
}

/* Whether a setting is a number from 0. */
NN_API bool nn_is_size(float value) {
    return value >= 0.0f && value < INFINITY;
}

/* Whether a tensor is a row of so many values. */
NN_API bool nn_is_row(const nn_net *net, ms_tensor tensor, int64_t width) {
    const ms_shape shape = ms_tensor_shape(net->model, tensor);
    return shape.rank == 1 && shape.dim[0] == width;
}

NN_API ms_tensor nn_rmsnorm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                 float epsilon, bool from_one) {
    const ms_tensor none = {0};
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 1 || !nn_is_row(net, weight, nn_last(shape))) {
        return nn_refuse(net, "nn_rmsnorm: the weight does not fit the input");
    }
    if (!nn_is_size(epsilon)) {
        return nn_refuse(net, "nn_rmsnorm: epsilon must be at least 0");
    }
    if (!nn_check_width(net, name, nn_last(shape))) {
        return none;
    }
    nn_rmsnorm_options options;
    memset(&options, 0, sizeof options);
    options.epsilon = epsilon;
    options.from_one = from_one;
    ms_layer_desc desc =
        nn_rmsnorm_desc(net, name, nn_rmsnorm_forward, nn_rmsnorm_backward, &options);
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.saved[0] = nn_saved(net, name, "rstd", nn_per_row(shape, 1));
    desc.flops = nn_elements(shape) * 4.0;
    desc.backward_flops = nn_elements(shape) * 10.0;
    nn_declare_rows(&desc, shape);
    desc.tile.saved_axes[0] = desc.tile.axes > 0;
    desc.backward_workspace = nn_norm_workspace(net, shape, desc.tile.axes, 1, nn_last(shape));
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_rmsnorm(nn_net *net, const char *name, ms_tensor x, float epsilon,
                            bool from_one) {
    const ms_shape width = ms_shape1(nn_last(ms_tensor_shape(net->model, x)));
    const ms_tensor weight = nn_param(net, nn_join(name, "weight").text, width,
                                      from_one ? NN_INIT_ZEROS : NN_INIT_ONES, 0.0f);
    return nn_rmsnorm_tied(net, name, x, weight, epsilon, from_one);
}

NN_API ms_tensor nn_head_norm(nn_net *net, const char *name, ms_tensor qkv,
                              const nn_head_norm_desc *d) {
    const ms_tensor none = {0};
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    const int64_t size = nn_last(ms_tensor_shape(net->model, d->queries));
    const int64_t most = nn_last(shape); // heads that may be there
    if (shape.rank != 3 || d->heads < 1 || d->kv_heads < 1 || d->heads > most ||
        d->kv_heads > most || !nn_is_row(net, d->queries, size) || !nn_is_row(net, d->keys, size) ||
        most != (d->heads + 2 * d->kv_heads) * size) {
        return nn_refuse(net,
                         "nn_head_norm: qkv must be (B, T, (heads + 2 * kv_heads) * size), and "
                         "the weights (size)");
    }
    if (!nn_is_size(d->epsilon)) {
        return nn_refuse(net, "nn_head_norm: epsilon must be at least 0");
    }
    if (!nn_check_width(net, name, size)) {
        return none;
    }
    nn_rmsnorm_options options;
    memset(&options, 0, sizeof options);
    options.epsilon = d->epsilon;
    options.from_one = d->from_one;
    options.heads = d->heads;
    options.kv_heads = d->kv_heads;
    ms_layer_desc desc =
        nn_rmsnorm_desc(net, name, nn_head_norm_forward, nn_head_norm_backward, &options);
    desc.in[0] = qkv;
    desc.param[0] = d->queries;
    desc.param[1] = d->keys;
    desc.saved[0] = nn_saved(net, name, "rstd_q", nn_per_row(shape, d->heads));
    desc.saved[1] = nn_saved(net, name, "rstd_k", nn_per_row(shape, d->kv_heads));
    desc.flops = nn_elements(shape) * 4.0;
    desc.backward_flops = nn_elements(shape) * 10.0;
    nn_declare_rows(&desc, shape);
    desc.tile.saved_axes[0] = desc.tile.saved_axes[1] = 1;
    desc.backward_workspace =
        nn_norm_workspace(net, shape, desc.tile.axes, nn_most(d->heads, d->kv_heads), size);
    return nn_register(net, &desc, shape);
}

/* The angle of a pair from one position to the next. */
NN_API double nn_rotary_angle(const nn_rotary_desc *d, int64_t pair, int64_t turned) {
    const nn_rotary_scaling *s = &d->scaling;
    const double theta = d->theta > 0.0f ? (double)d->theta : 10000.0;
    const double angle = pow(theta, -2.0 * (double)pair / (double)turned);
    const double times = (double)s->original * angle / 6.283185307179586; // that the pair turns
    const double low = (double)s->low, high = (double)s->high;
    switch (s->kind) {
    case NN_ROTARY_PLAIN:
        return angle;
    case NN_ROTARY_LINEAR:
        return angle / (double)s->factor;
    case NN_ROTARY_LLAMA3:
        break;
    }
    const double share = times < low ? 0.0 : times > high ? 1.0 : (times - low) / (high - low);
    return angle * (share + (1.0 - share) / (double)s->factor);
}

/* Whether angles can be scaled like that. */
NN_API bool nn_is_scaling(const nn_rotary_scaling *s) {
    return s->kind == NN_ROTARY_PLAIN ||
           (s->factor > 0.0f && s->factor < INFINITY &&
            (s->kind == NN_ROTARY_LINEAR ||
             (s->original > 0 && s->low > 0.0f && s->high > s->low && s->high < INFINITY)));
}

NN_API ms_tensor nn_rotary(nn_net *net, const char *name, ms_tensor x, const nn_rotary_desc *d) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    const int64_t turned = d->turned != 0 ? d->turned : d->size;
    if (shape.rank != 3 || d->heads < 1 || d->size < 1 || d->heads > nn_last(shape) / d->size ||
        turned < 2 || turned % 2 != 0 || turned > d->size || turned > 2 * NN_PAIRS) {
        return nn_refuse(net,
                         "nn_rotary: x must be (B, T, at least heads * size), and what is turned "
                         "of a head even, at most its size and 256");
    }
    if (!nn_is_scaling(&d->scaling) || !nn_is_size(d->theta)) {
        return nn_refuse(net,
                         "nn_rotary: theta must be at least 0, factor, original and low above 0, "
                         "and high above low");
    }
    nn_rotary_options options;
    memset(&options, 0, sizeof options);
    options.turns.heads = d->heads;
    options.turns.size = d->size;
    options.turns.pairs = turned / 2;
    options.turns.adjacent = d->adjacent;
    for (int64_t i = 0; i < turned / 2; i++) {
        options.turns.inverse[i] = (float)nn_rotary_angle(d, i, turned);
    }
    ms_layer_desc desc = nn_desc(name, nn_rotary_forward, nn_rotary_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 3.0;
    desc.backward_flops = desc.flops;
    desc.tile.axes = 1; // sequences, since a call must see how long they are
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_gated(nn_net *net, const char *name, ms_tensor gate, ms_tensor up,
                          nn_gate kind) {
    const ms_shape shape = ms_tensor_shape(net->model, gate);
    const ms_shape other = ms_tensor_shape(net->model, up);
    if (!nn_counts_match(shape, other)) {
        return nn_refuse(net, "nn_swiglu, nn_geglu: the sizes of gate and up differ");
    }
    nn_gated_options options;
    memset(&options, 0, sizeof options);
    options.kind = kind;
    ms_layer_desc desc = nn_desc(name, nn_gated_forward, nn_gated_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = gate;
    desc.in[1] = up;
    desc.backward_reads.in = 3;
    desc.in_place[0] = 3;
    for (int i = 0; i < 2; i++) {
        desc.grad_in_place[i].in = 3;
        desc.grad_in_place[i].grad_out = 1;
    }
    desc.flops = nn_elements(shape) * 20.0;
    desc.backward_flops = nn_elements(shape) * 30.0;
    nn_declare_rows(&desc, shape);
    desc.tile.in_axes[1] = nn_row_dims(other, shape, desc.tile.axes);
    desc.tile.axes = desc.tile.in_axes[1] > 0 ? desc.tile.axes : 0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_swiglu(nn_net *net, const char *name, ms_tensor gate, ms_tensor up) {
    return nn_gated(net, name, gate, up, NN_GATE_SILU);
}

NN_API ms_tensor nn_geglu(nn_net *net, const char *name, ms_tensor gate, ms_tensor up) {
    return nn_gated(net, name, gate, up, NN_GATE_GELU);
}

/* Of nn_scale and nn_softcap. */
NN_API ms_layer_desc nn_factor_desc(nn_net *net, const char *name, ms_layer_fn forward,
                                    ms_layer_fn backward, ms_tensor x, float factor) {
    nn_scale_options options;
    memset(&options, 0, sizeof options);
    options.factor = factor;
    ms_layer_desc desc = nn_desc(name, forward, backward, nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    nn_declare_rows(&desc, ms_tensor_shape(net->model, x));
    return desc;
}

NN_API ms_tensor nn_scale(nn_net *net, const char *name, ms_tensor x, float factor) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc = nn_factor_desc(net, name, nn_scale_forward, nn_scale_backward, x, factor);
    desc.backward_reads.nothing = true;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_softcap(nn_net *net, const char *name, ms_tensor x, float cap) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (!(cap > 0.0f && cap < INFINITY)) {
        return nn_refuse(net, "nn_softcap: the cap must be above 0");
    }
    ms_layer_desc desc = nn_factor_desc(net, name, nn_softcap_forward, nn_softcap_backward, x, cap);
    desc.backward_reads.out = 1;
    desc.grad_in_place[0].out = 1;
    desc.flops = nn_elements(shape) * 20.0;
    desc.backward_flops = nn_elements(shape) * 4.0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_gelu_of_form(nn_net *net, const char *name, ms_tensor x, bool erf_form) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    nn_gelu_options options;
    memset(&options, 0, sizeof options);
    options.erf_form = erf_form;
    ms_layer_desc desc =
        nn_desc(name, nn_gelu_forward, nn_gelu_backward, nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.backward_reads.in = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 20.0;
    desc.backward_flops = nn_elements(shape) * 30.0;
    nn_declare_rows(&desc, shape);
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_gelu(nn_net *net, const char *name, ms_tensor x) {
    return nn_gelu_of_form(net, name, x, false);
}

NN_API ms_tensor nn_gelu_erf(nn_net *net, const char *name, ms_tensor x) {
    return nn_gelu_of_form(net, name, x, true);
}

NN_API ms_tensor nn_add(nn_net *net, const char *name, ms_tensor a, ms_tensor b) {
    const ms_shape shape = ms_tensor_shape(net->model, a);
    const ms_shape other = ms_tensor_shape(net->model, b);
    if (!nn_counts_match(shape, other)) {
        return nn_refuse(net, "nn_add: the sizes differ");
    }
    ms_layer_desc desc = nn_desc(name, nn_add_forward, nn_add_backward, nn_attach_nothing(net));
    desc.in[0] = a;
    desc.in[1] = b;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 3;
    desc.grad_in_place[0].grad_out = 1;
    desc.grad_in_place[1].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    nn_declare_rows(&desc, shape);
    desc.tile.in_axes[1] = nn_row_dims(other, shape, desc.tile.axes);
    desc.tile.axes = desc.tile.in_axes[1] > 0 ? desc.tile.axes : 0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_dropout(nn_net *net, const char *name, ms_tensor x, float probability) {
    if (probability <= 0.0f) {
        return x;
    }
    if (!(probability < 1.0f)) {
        return nn_refuse(net, "nn_dropout: the probability must be below 1");
    }
    const ms_shape shape = ms_tensor_shape(net->model, x);
    nn_dropout_options options;
    memset(&options, 0, sizeof options);
    options.probability = probability;
    ms_layer_desc desc = nn_desc(name, nn_dropout_forward, nn_dropout_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 10.0;
    desc.backward_flops = desc.flops; // the mask is drawn again
    nn_declare_rows(&desc, shape);
    return nn_register(net, &desc, shape);
}

/* For each pair of a query and a key: two products in forward, four in backward and one more if the
   probabilities are computed again, and the softmax. If some queries at a time omit the keys that
   none of them sees, a query has pairs with the keys up to the last of these queries. On the CPU, a
   backward of long sequences in 16 bits has two more products, which are not counted. */
NN_API double nn_attention_flops(const nn_device *device, nn_attention_size n, bool keeps_scores,
                                 bool backward) {
    const double products = backward ? (keeps_scores ? 4.0 : 5.0) : 2.0;
    const double softmax = backward && keeps_scores ? 5.0 : backward ? 15.0 : 10.0;
    const int64_t queries = device->attention_queries(keeps_scores);
    double keys = (double)n.sequence;
    if (n.causal && queries != 0 && n.sequence > queries) {
        keys = 0.5 * (double)(n.sequence + queries);
    }
    if (n.window > 0 && queries != 0 && (double)(n.window + queries) < keys) {
        keys = (double)(n.window + queries);
    }
    return (double)(n.batch * n.heads * n.sequence) * keys *
           (2.0 * products * (double)n.size + softmax);
}

NN_API int64_t nn_attention_scratch(const nn_device *device, nn_attention_size n, bool keeps_scores,
                                    bool backward) {
    return keeps_scores ? device->attention_floats(n, backward)
                        : device->tiled_attention_floats(n, backward);
}

/* Of some sequences. */
NN_API int64_t nn_sequence_scratch(const nn_scratch *s, int64_t rows) {
    nn_attention_size n = s->attention;
    n.batch = rows;
    return nn_attention_scratch(s->device, n, s->keeps_scores, s->backward);
}

NN_API nn_scratch nn_sequences_of(const nn_device *device, nn_attention_size n, bool keeps_scores,
                                  bool backward) {
    nn_scratch s;
    memset(&s, 0, sizeof s);
    s.floats = nn_sequence_scratch;
    s.device = device;
    s.rows = n.batch;
    s.attention = n;
    s.keeps_scores = keeps_scores;
    s.backward = backward;
    return s;
}

NN_API ms_workspace nn_attention_workspace(const nn_device *device, nn_attention_size n,
                                           bool keeps_scores, bool backward) {
    const nn_scratch s = nn_sequences_of(device, n, keeps_scores, backward);
    return nn_workspace_by_rows(&s);
}

/* (B, H, T, T), from the shape of qkv, or of another (B, T, ...). */
NN_API ms_shape nn_scores_shape(ms_shape x, int64_t heads) {
    ms_shape scores = ms_shape4(x.dim[0], heads, x.dim[1], x.dim[1]);
    scores.axes[0] = x.axes[0];
    scores.axes[2] = x.axes[1];
    scores.axes[3] = x.axes[1];
    return scores;
}

/* (B, H, T) */
NN_API ms_shape nn_log_sums_shape(ms_shape x, int64_t heads) {
    ms_shape sums = ms_shape3(x.dim[0], heads, x.dim[1]);
    sums.axes[0] = x.axes[0];
    sums.axes[2] = x.axes[1];
    return sums;
}

/* The attention of qkv (B, T, columns), of sizes that fit it. */
NN_API ms_tensor nn_register_attention(nn_net *net, const char *name, ms_tensor qkv,
                                       nn_attention_size size, bool save_scores) {
    const ms_tensor none = {0};
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    const ms_shape all = nn_largest(net, shape);
    const nn_attention_size n = nn_attention_size_of(size, shape);
    const nn_attention_size largest = nn_attention_size_of(size, all);
    if (save_scores && !nn_check_width(net, name, largest.sequence)) {
        return none;
    }
    nn_attention_options options;
    memset(&options, 0, sizeof options);
    options.size = size;
    ms_layer_desc desc =
        nn_desc(name, save_scores ? nn_attention_forward : nn_tiled_attention_forward,
                save_scores ? nn_attention_backward : nn_tiled_attention_backward,
                nn_attach(net, &options, sizeof options));
    desc.in[0] = qkv;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 1;
    desc.optional_saved = 1;
    if (save_scores) {
        desc.saved[0] = nn_saved(net, name, "scores", nn_scores_shape(shape, n.heads));
        desc.grad_in_place[0].in = 1;
    } else {
        desc.saved[0] = nn_saved(net, name, "log_sums", nn_log_sums_shape(shape, n.heads));
        desc.dtypes.f32_saved = 1;
        desc.backward_reads.out = 1;
    }
    desc.forward_workspace = nn_attention_workspace(net->device, largest, save_scores, false);
    desc.backward_workspace = nn_attention_workspace(net->device, largest, save_scores, true);
    desc.flops = nn_attention_flops(net->device, n, save_scores, false);
    desc.backward_flops = nn_attention_flops(net->device, n, save_scores, true);
    desc.tile.axes = 1; // sequences
    return nn_register(net, &desc, nn_with_last(shape, nn_attention_width(&n)));
}

NN_API ms_tensor nn_attention(nn_net *net, const char *name, ms_tensor qkv, int64_t heads,
                              bool causal, bool save_scores) {
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    if (shape.rank != 3 || heads < 1 || shape.dim[2] % (3 * heads) != 0) {
        return nn_refuse(net, "nn_attention: qkv must be (B, T, 3 * heads * size)");
    }
    return nn_register_attention(
        net, name, qkv, nn_plain_attention(heads, shape.dim[2] / 3 / heads, causal), save_scores);
}

NN_API ms_tensor nn_grouped_attention(nn_net *net, const char *name, ms_tensor qkv,
                                      const nn_heads_desc *heads) {
    const ms_shape shape = ms_tensor_shape(net->model, qkv);
    const int64_t kv_heads = heads->kv_heads != 0 ? heads->kv_heads : heads->heads;
    if (shape.rank != 3 || heads->heads < 1 || kv_heads < 1 || heads->heads % kv_heads != 0 ||
        heads->heads > shape.dim[2] || shape.dim[2] % (heads->heads + 2 * kv_heads) != 0) {
        return nn_refuse(net, "nn_grouped_attention: qkv must be (B, T, (heads + 2 * kv_heads) * "
                              "size), and heads a multiple of kv_heads");
    }
    if (heads->window < 0 || !nn_is_size(heads->cap) || !nn_is_size(heads->scale) ||
        (heads->window > 0 && !heads->causal)) {
        return nn_refuse(net, "nn_grouped_attention: window, cap and scale are at least 0, and a "
                              "window is for causal attention");
    }
    nn_attention_size n = nn_plain_attention(
        heads->heads, shape.dim[2] / (heads->heads + 2 * kv_heads), heads->causal);
    n.kv_heads = kv_heads;
    n.window = heads->window;
    n.cap = heads->cap;
    n.scale = heads->scale > 0.0f ? heads->scale : n.scale;
    return nn_register_attention(net, name, qkv, n, false);
}

NN_API ms_tensor nn_cross_entropy(nn_net *net, const char *name, ms_tensor logits,
                                  ms_tensor targets) {
    const ms_shape shape = ms_tensor_shape(net->model, logits);
    const ms_shape rows = ms_tensor_shape(net->model, targets);
    if (shape.rank < 1 || !nn_counts_match(nn_per_row(shape, 1), rows)) {
        return nn_refuse(net, "nn_cross_entropy: there must be one target per row of the logits");
    }
    ms_layer_desc desc =
        nn_desc(name, nn_cross_entropy_forward, nn_cross_entropy_backward, nn_attach_nothing(net));
    desc.in[0] = logits;
    desc.in[1] = targets;
    desc.saved[0] = nn_saved(net, name, "stats", nn_per_row(shape, 2));
    desc.dtypes.f32_out = 1;
    desc.dtypes.f32_saved = 1;
    desc.backward_reads.in = 3;
    desc.backward_reads.saved = 1;
    desc.grad_in_place[0].in = 1;
    desc.flops = nn_elements(shape) * 15.0;
    desc.backward_flops = desc.flops;
    if (rows.rank == shape.rank - 1) {
        desc.tile.axes = (uint32_t)rows.rank;
        desc.tile.saved_axes[0] = 1;
    }
    return nn_register_indexed(net, &desc, rows, 2);
}

NN_API ms_tensor nn_relu(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    ms_layer_desc desc = nn_desc(name, nn_relu_forward, nn_relu_backward, nn_attach_nothing(net));
    desc.in[0] = x;
    desc.backward_reads.out = 1;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].out = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    nn_declare_rows(&desc, shape);
    return nn_register(net, &desc, shape);
}

NN_API float nn_kaiming(int64_t fan_in) {
    return sqrtf(2.0f / (float)fan_in);
}

/* The shape of the images that a window gives; false after a sticky error, if it does not fit. */
NN_API bool nn_window_shape(nn_net *net, ms_shape x, int64_t channels, int64_t kernel,
                            int64_t stride, int64_t padding, ms_shape *out) {
    if (x.rank != 4 || nn_axes(x, 1, 4) != 0) {
        nn_refuse(net, "nn: images must be (B, C, height, width), with only B along an axis");
        return false;
    }
    if (kernel < 1 || stride < 1 || padding < 0 || kernel > INT32_MAX || padding > INT32_MAX) {
        nn_refuse(net, "nn: kernel and stride must be at least 1, padding at least 0");
        return false;
    }
    const nn_window w = nn_window_of(x, kernel, stride, padding);
    if (w.out_height < 1 || w.out_width < 1) {
        nn_refuse(net, "nn: the kernel is larger than the image with its padding");
        return false;
    }
    *out = x;
    out->dim[1] = channels;
    out->dim[2] = w.out_height;
    out->dim[3] = w.out_width;
    return true;
}

NN_API void *nn_attach_window(nn_net *net, int64_t kernel, int64_t stride, int64_t padding,
                              bool biased) {
    nn_window_options options;
    memset(&options, 0, sizeof options);
    options.bias.biased = biased;
    options.kernel = kernel;
    options.stride = stride;
    options.padding = padding;
    return nn_attach(net, &options, sizeof options);
}

/* Of some images. */
NN_API int64_t nn_image_scratch(const nn_scratch *s, int64_t rows) {
    nn_window w = s->window;
    w.images = rows;
    return s->device->conv2d_floats(&w, s->columns, s->backward);
}

NN_API ms_workspace nn_conv2d_workspace(const nn_device *device, const nn_window *w, int64_t out,
                                        bool backward) {
    nn_scratch s;
    memset(&s, 0, sizeof s);
    s.floats = nn_image_scratch;
    s.device = device;
    s.rows = w->images;
    s.columns = out;
    s.window = *w;
    s.backward = backward;
    return nn_workspace_by_rows(&s);
}

NN_API ms_tensor nn_conv2d_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                ms_tensor bias, int64_t kernel, int64_t stride, int64_t padding) {
    const ms_tensor none = {0};
    const ms_shape from = ms_tensor_shape(net->model, x);
    const ms_shape matrix = ms_tensor_shape(net->model, weight);
    ms_shape out;
    if (!nn_window_shape(net, from, matrix.dim[0], kernel, stride, padding, &out)) {
        return none;
    }
    if (matrix.rank != 2 || matrix.dim[1] != from.dim[1] * kernel * kernel) {
        return nn_refuse(net, "nn_conv2d: the weight does not fit the images and the kernel");
    }
    const nn_window w = nn_window_of(nn_largest(net, from), kernel, stride, padding);
    ms_layer_desc desc = nn_desc(name, nn_conv2d_forward, nn_conv2d_backward,
                                 nn_attach_window(net, kernel, stride, padding, bias.id != 0));
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.backward_reads.in = 1;
    desc.backward_reads.param = 1;
    desc.dtypes.f32_param = nn_bias_mask(bias);
    desc.grad_in_place[0].in = 1;
    desc.forward_workspace = nn_conv2d_workspace(net->device, &w, matrix.dim[0], false);
    desc.backward_workspace = nn_conv2d_workspace(net->device, &w, matrix.dim[0], true);
    desc.flops = nn_elements(out) * 2.0 * (double)matrix.dim[1];
    nn_declare_rows(&desc, out);
    return nn_register(net, &desc, out);
}

NN_API ms_tensor nn_conv2d(nn_net *net, const char *name, ms_tensor x, int64_t out_channels,
                           int64_t kernel, int64_t stride, int64_t padding) {
    const int64_t depth = ms_tensor_shape(net->model, x).dim[1] * kernel * kernel;
    const nn_pair pair = nn_linear_params(net, name, depth, out_channels, nn_kaiming(depth));
    return nn_conv2d_tied(net, name, x, pair.weight, pair.bias, kernel, stride, padding);
}

NN_API ms_tensor nn_max_pool(nn_net *net, const char *name, ms_tensor x, int64_t kernel,
                             int64_t stride, int64_t padding) {
    const ms_tensor none = {0};
    const ms_shape from = ms_tensor_shape(net->model, x);
    ms_shape out;
    if (!nn_window_shape(net, from, from.dim[1], kernel, stride, padding, &out)) {
        return none;
    }
    if (2 * padding > kernel || from.dim[2] > INT32_MAX / from.dim[3]) {
        return nn_refuse(net, "nn_max_pool: padding is above kernel / 2, or an image has over 2^31 "
                              "pixels");
    }
    ms_layer_desc desc = nn_desc(name, nn_max_pool_forward, nn_max_pool_backward,
                                 nn_attach_window(net, kernel, stride, padding, false));
    desc.in[0] = x;
    desc.saved[0] = ms_saved(net->model, nn_join(name, "places").text, MS_DTYPE_I32, out);
    desc.backward_reads.saved = 1;
    desc.optional_saved = 1;
    desc.flops = nn_elements(out) * (double)(kernel * kernel) * 2.0;
    desc.backward_flops = nn_elements(out);
    nn_declare_rows(&desc, out);
    return nn_register(net, &desc, out);
}

NN_API ms_tensor nn_batch_norm_tied(nn_net *net, const char *name, ms_tensor x, ms_tensor weight,
                                    ms_tensor bias) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 2 || shape.axes[1] != 0 ||
        nn_last(ms_tensor_shape(net->model, weight)) != shape.dim[1]) {
        return nn_refuse(net, "nn_batch_norm: x must be (B, C, ...), C along no axis, weight (C)");
    }
    const ms_shape channels = ms_shape1(shape.dim[1]);
    nn_batch_norm_options options;
    memset(&options, 0, sizeof options);
    options.epsilon = 1e-5f;
    options.momentum = 0.1f;
    ms_layer_desc desc = nn_desc(name, nn_batch_norm_forward, nn_batch_norm_backward,
                                 nn_attach(net, &options, sizeof options));
    desc.recompute = nn_batch_norm_recompute;
    desc.in[0] = x;
    desc.param[0] = weight;
    desc.param[1] = bias;
    desc.state[0] = nn_buffer(net, nn_join(name, "mean").text, channels, NN_INIT_ZEROS);
    desc.state[1] = nn_buffer(net, nn_join(name, "variance").text, channels, NN_INIT_ONES);
    desc.recompute_keeps_state = true;
    desc.saved[0] = nn_saved(net, name, "batch_mean", channels);
    desc.saved[1] = nn_saved(net, name, "batch_rstd", channels);
    desc.optional_saved = 3;
    desc.dtypes.f32_saved = 3;
    desc.dtypes.f32_param = 3;
    desc.backward_reads.in = 1;
    desc.backward_reads.saved = 3;
    desc.backward_reads.param = 1;
    desc.recompute_reads.in = 1;
    desc.recompute_reads.saved = 3;
    desc.recompute_reads.param = 3;
    desc.forward_workspace =
        nn_workspace(net->device->batch_norm_floats(nn_planes_of(nn_largest(net, shape))));
    desc.backward_workspace = desc.forward_workspace;
    desc.recompute_workspace = desc.forward_workspace;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].in = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape) * 8.0;
    desc.recompute_flops = nn_elements(shape) * 4.0;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_batch_norm(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    const nn_pair pair = nn_layernorm_params(net, name, shape.rank < 2 ? 1 : shape.dim[1]);
    return nn_batch_norm_tied(net, name, x, pair.weight, pair.bias);
}

NN_API ms_tensor nn_average_pool(nn_net *net, const char *name, ms_tensor x) {
    ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank != 4) {
        return nn_refuse(net, "nn_average_pool: images must be (B, C, height, width)");
    }
    ms_layer_desc desc =
        nn_desc(name, nn_average_pool_forward, nn_average_pool_backward, nn_attach_nothing(net));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    shape.rank = 2;
    shape.axes[2] = 0;
    shape.axes[3] = 0;
    desc.tile.axes = 1;
    return nn_register(net, &desc, shape);
}

NN_API ms_tensor nn_flatten(nn_net *net, const char *name, ms_tensor x) {
    const ms_shape shape = ms_tensor_shape(net->model, x);
    if (shape.rank < 2) {
        return nn_refuse(net, "nn_flatten: x must be (B, ...)");
    }
    ms_shape out = ms_shape2(shape.dim[0], (int64_t)ms_shape_count(&shape) / shape.dim[0]);
    out.axes[0] = shape.axes[0];
    out.axes[1] = nn_axes(shape, 1, shape.rank);
    ms_layer_desc desc =
        nn_desc(name, nn_flatten_forward, nn_flatten_backward, nn_attach_nothing(net));
    desc.in[0] = x;
    desc.backward_reads.nothing = true;
    desc.in_place[0] = 1;
    desc.grad_in_place[0].grad_out = 1;
    desc.flops = nn_elements(shape);
    desc.backward_flops = desc.flops;
    desc.tile.axes = 1;
    return nn_register(net, &desc, out);
}

// ------------------------------------------------------------------------------------------------
// >>nn block  a whole transformer block as one layer

/* The slots of a block's params and saved tensors, the same for both orders of normalization.
   Pre-norm: sum1 = x + attend(norm1(x)), out = sum1 + mlp(norm2(sum1)).
   Post-norm: sum1 = x + attend(x), sum2 = norm1(sum1) + mlp(norm1(sum1)), out = norm2(sum2). */
enum {
    NN_P_NORM1 = 0, // weight; the bias is in the next slot
    NN_P_QKV = 2,
    NN_P_PROJ = 4,
    NN_P_NORM2 = 6,
    NN_P_FC = 8,
    NN_P_FCPROJ = 10,
    NN_P_COUNT = 12,
    NN_P_MATRICES = 1 << NN_P_QKV | 1 << NN_P_PROJ | 1 << NN_P_FC | 1 << NN_P_FCPROJ,
    NN_P_FLOATS = ((1 << NN_P_COUNT) - 1) & ~NN_P_MATRICES // F32 in every call
};

enum {
    NN_S_NORM1,
    NN_S_MEAN1,
    NN_S_RSTD1,
    NN_S_QKV,
    NN_S_ATTENTION,
    NN_S_SUM1,
    NN_S_MEAN2,
    NN_S_RSTD2,
    NN_S_FCH,
    NN_S_GELU,
    NN_S_SCORES,   // only where they are saved
    NN_S_LOG_SUMS, // only without
    NN_S_NORM2,    // only pre-norm
    NN_S_SUM2,     // only post-norm
    NN_S_COUNT,
    NN_S_FLOATS =
        1 << NN_S_MEAN1 | 1 << NN_S_RSTD1 | 1 << NN_S_MEAN2 | 1 << NN_S_RSTD2 | 1 << NN_S_LOG_SUMS
};

typedef struct nn_block_options {
    nn_options common;
    nn_attention_size attention; // batch and sequence are those of the call
    float dropout, epsilon;
    bool post_norm, erf_form, keeps_scores;
} nn_block_options;

/* The operands of a block in one call. */
typedef struct nn_block {
    const ms_call *call;
    const nn_block_options *options;
    const nn_device *device;
    int64_t rows, channels, hidden;
    nn_attention_size attention;
    bool drops;
    nn_values saved[NN_S_COUNT];
    nn_values param[NN_P_COUNT];
    nn_dest grad[NN_P_COUNT];
} nn_block;

NN_API nn_block nn_block_of(const ms_call *call) {
    nn_block block;
    memset(&block, 0, sizeof block);
    const nn_block_options *options = (const nn_block_options *)call->user;
    const ms_shape x = call->in[0].shape;
    block.call = call;
    block.options = options;
    block.device = options->common.device;
    block.rows = nn_rows(x);
    block.channels = nn_last(x);
    block.hidden = call->param[NN_P_FC].shape.dim[0];
    block.attention = nn_attention_size_of(options->attention, x);
    block.drops = options->dropout > 0.0f;
    for (int i = 0; i < NN_S_SCORES; i++) {
        block.saved[i] = nn_values_of(&call->saved[i]);
    }
    const int kept = options->keeps_scores ? NN_S_SCORES : NN_S_LOG_SUMS;
    block.saved[kept] = nn_values_of(&call->saved[kept]);
    const int last = options->post_norm ? NN_S_SUM2 : NN_S_NORM2;
    block.saved[last] = nn_values_of(&call->saved[last]);
    for (int i = 0; i < NN_P_COUNT; i++) {
        block.param[i] = nn_values_of(&call->param[i]);
        block.grad[i] = nn_gradient_of(&call->grad_param[i]);
    }
    return block;
}

NN_API nn_linear_size nn_block_size(const nn_block *b, int64_t in, int64_t out) {
    nn_linear_size n;
    n.rows = b->rows;
    n.in = in;
    n.out = out;
    return n;
}

/* A param that is F32 in every call: a bias, or of a normalization. */
NN_API const float *nn_block_floats_of(const nn_block *b, int param) {
    return (const float *)b->param[param].data;
}

NN_API float *nn_block_log_sums(const nn_block *b) {
    return (float *)b->saved[NN_S_LOG_SUMS].data;
}

NN_API int nn_block_linear_backward(const nn_block *b, int param, nn_dest dx, nn_values dy,
                                    nn_values x, nn_linear_size n, float *work) {
    return b->device->linear_backward(b->call, dx, b->grad[param], b->grad[param + 1], dy, x,
                                      b->param[param], n, work);
}

NN_API nn_norm nn_block_norm_of(const nn_block *b, int param, int mean) {
    nn_norm n;
    memset(&n, 0, sizeof n);
    n.rows = b->rows;
    n.width = b->channels;
    n.weight = nn_block_floats_of(b, param);
    n.bias = nn_block_floats_of(b, param + 1);
    n.mean = (float *)b->saved[mean].data;
    n.rstd = (float *)b->saved[mean + 1].data;
    n.epsilon = b->options->epsilon;
    return n;
}

NN_API int nn_block_norm(const nn_block *b, int param, int mean, nn_values y, nn_values x) {
    const nn_norm n = nn_block_norm_of(b, param, mean);
    return b->device->layernorm(b->call, y, x, &n);
}

NN_API int nn_block_norm_backward(const nn_block *b, int param, int mean, nn_dest dx, nn_values dy,
                                  nn_values x, float *work) {
    const nn_norm n = nn_block_norm_of(b, param, mean);
    return b->device->layernorm_backward(b->call, dx, b->grad[param], b->grad[param + 1], dy, x, &n,
                                         work);
}

/* The dropout of branch 0 (attention) or 1 (MLP), each of which has a seed of its own. */
NN_API nn_drop nn_block_drop(const nn_block *b, int branch) {
    nn_drop drop;
    drop.probability = b->call->phase != MS_PHASE_EVAL ? b->options->dropout : 0.0f;
    drop.seed = nn_seed_of(b->call, branch, b->rows * b->channels);
    return drop;
}

/* *dy, the gradient of the dropout's output, becomes that of its input: a masked copy, if the block
   drops at all. */
NN_API int nn_block_drop_backward(const nn_block *b, int branch, nn_values *dy, nn_values copy) {
    if (!b->drops) {
        return 0;
    }
    const int64_t count = b->rows * b->channels;
    const int result = b->device->dropout(b->call, nn_dest_of(copy, 0.0f), *dy, count,
                                          b->options->dropout, nn_seed_of(b->call, branch, count));
    *dy = copy;
    return result;
}

/* y = residual + dropout(proj(attention(qkv(x)))) */
NN_API int nn_block_attend(const nn_block *b, nn_values y, nn_values residual, nn_values x) {
    const int64_t channels = b->channels;
    int result = b->device->linear(b->call, b->saved[NN_S_QKV], x, b->param[NN_P_QKV],
                                   nn_block_floats_of(b, NN_P_QKV + 1),
                                   nn_block_size(b, channels, nn_attention_columns(&b->attention)));
    if (result == 0) {
        float *work = (float *)b->call->workspace;
        const nn_values out = b->saved[NN_S_ATTENTION];
        const nn_values qkv = b->saved[NN_S_QKV];
        result =
            b->options->keeps_scores
                ? b->device->attention(b->call, out, b->saved[NN_S_SCORES], qkv, work, b->attention)
                : b->device->tiled_attention(b->call, out, nn_block_log_sums(b), qkv, work,
                                             b->attention);
    }
    if (result == 0) {
        const nn_drop drop = nn_block_drop(b, 0);
        result = b->device->linear_add(b->call, y, residual, b->saved[NN_S_ATTENTION],
                                       b->param[NN_P_PROJ], nn_block_floats_of(b, NN_P_PROJ + 1),
                                       nn_block_size(b, channels, channels), &drop);
    }
    return result;
}

/* y = residual + dropout(fcproj(gelu(fc(x)))) */
NN_API int nn_block_mlp(const nn_block *b, nn_values y, nn_values residual, nn_values x) {
    int result =
        b->device->linear_gelu(b->call, b->saved[NN_S_GELU], b->saved[NN_S_FCH], x,
                               b->param[NN_P_FC], nn_block_floats_of(b, NN_P_FC + 1),
                               nn_block_size(b, b->channels, b->hidden), b->options->erf_form);
    if (result == 0) {
        const nn_drop drop = nn_block_drop(b, 1);
        result =
            b->device->linear_add(b->call, y, residual, b->saved[NN_S_GELU], b->param[NN_P_FCPROJ],
                                  nn_block_floats_of(b, NN_P_FCPROJ + 1),
                                  nn_block_size(b, b->hidden, b->channels), &drop);
    }
    return result;
}

/* The parts of the workspace of a block's backward. The gradients among them have the dtype of the
   call, like those between operator layers: in 16 bits they take half of their memory. */
typedef struct nn_block_scratch {
    float *work;        // scratch memory of the kernels
    nn_values wide;     // (rows, hidden), then (rows, 3C)
    nn_values narrow;   // (rows, C)
    nn_values residual; // (rows, C): the gradient of the residual stream
    nn_values masked;   // (rows, C), only with dropout
} nn_block_scratch;

NN_API int64_t nn_block_wide(int64_t channels, int64_t hidden) {
    return nn_most(hidden, 3 * channels);
}

/* Floats of scratch memory of the kernels in a block's backward: whole cache lines, so that what
   follows stays aligned. */
NN_API int64_t nn_block_floats(const nn_device *device, nn_attention_size n, int64_t hidden,
                               bool keeps_scores) {
    const int64_t rows = n.batch * n.sequence;
    const int64_t channels = n.heads * n.size;
    const int64_t columns = device->column_floats(rows, nn_block_wide(channels, hidden));
    int64_t floats = nn_attention_scratch(device, n, keeps_scores, true);
    floats = nn_most(floats, nn_most(columns, device->layernorm_floats(rows, channels)));
    return (floats + 15) / 16 * 16;
}

/* Of some sequences; columns: those of the hidden layer. */
NN_API int64_t nn_blocks_scratch(const nn_scratch *s, int64_t rows) {
    nn_attention_size n = s->attention;
    n.batch = rows;
    return nn_block_floats(s->device, n, s->columns, s->keeps_scores);
}

NN_API nn_block_scratch nn_block_scratch_of(const nn_block *b) {
    nn_block_scratch s;
    s.work = (float *)b->call->workspace;
    const float *rest =
        s.work + nn_block_floats(b->device, b->attention, b->hidden, b->options->keeps_scores);
    s.wide = nn_values_in(rest, b->saved[NN_S_QKV].dtype);
    s.narrow = nn_from(s.wide, b->rows * nn_block_wide(b->channels, b->hidden));
    s.residual = nn_from(s.narrow, b->rows * b->channels);
    s.masked = nn_from(s.residual, b->rows * b->channels);
    return s;
}

/* Bytes of the other parts for one sequence. */
NN_API uint64_t nn_block_row_bytes(int64_t sequence, int64_t channels, int64_t hidden, bool drops) {
    const int64_t floats = nn_block_wide(channels, hidden) + channels * (drops ? 3 : 2);
    return (uint64_t)(sequence * floats) * sizeof(float);
}

/* Backward of nn_block_attend without its residual: dx is for the gradient of x, dy is that of
   y. */
NN_API int nn_block_attend_backward(const nn_block *b, const nn_block_scratch *s, nn_dest dx,
                                    nn_values dy, nn_values x) {
    const int64_t channels = b->channels;
    int result = nn_block_drop_backward(b, 0, &dy, s->masked);
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_PROJ, nn_dest_of(s->narrow, 0.0f), dy,
                                          b->saved[NN_S_ATTENTION],
                                          nn_block_size(b, channels, channels), s->work);
    }
    if (result == 0) {
        const nn_dest dqkv = nn_dest_of(s->wide, 0.0f);
        const nn_values qkv = b->saved[NN_S_QKV];
        result =
            b->options->keeps_scores
                ? b->device->attention_backward(b->call, dqkv, s->narrow, b->saved[NN_S_SCORES],
                                                qkv, s->work, b->attention)
                : b->device->tiled_attention_backward(
                      b->call, dqkv, s->narrow, b->saved[NN_S_ATTENTION], nn_block_log_sums(b), qkv,
                      s->work, b->attention);
    }
    if (result == 0) {
        result = nn_block_linear_backward(
            b, NN_P_QKV, dx, s->wide, x,
            nn_block_size(b, channels, nn_attention_columns(&b->attention)), s->work);
    }
    return result;
}

/* The same for nn_block_mlp. */
NN_API int nn_block_mlp_backward(const nn_block *b, const nn_block_scratch *s, nn_dest dx,
                                 nn_values dy, nn_values x) {
    const nn_dest wide = nn_dest_of(s->wide, 0.0f);
    int result = nn_block_drop_backward(b, 1, &dy, s->masked);
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_FCPROJ, wide, dy, b->saved[NN_S_GELU],
                                          nn_block_size(b, b->hidden, b->channels), s->work);
    }
    if (result == 0) {
        result = b->device->gelu_backward(b->call, wide, s->wide, b->saved[NN_S_FCH],
                                          b->rows * b->hidden, b->options->erf_form);
    }
    if (result == 0) {
        result = nn_block_linear_backward(b, NN_P_FC, dx, s->wide, x,
                                          nn_block_size(b, b->channels, b->hidden), s->work);
    }
    return result;
}

NN_API int nn_block_pre_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_values x = nn_values_of(&call->in[0]);
    const nn_values norm1 = b.saved[NN_S_NORM1];
    const nn_values sum1 = b.saved[NN_S_SUM1];
    const nn_values norm2 = b.saved[NN_S_NORM2];
    int result = nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, norm1, x);
    if (result == 0) {
        result = nn_block_attend(&b, sum1, x, norm1);
    }
    if (result == 0) {
        result = nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, norm2, sum1);
    }
    return result != 0 ? result : nn_block_mlp(&b, nn_values_of(&call->out[0]), sum1, norm2);
}

NN_API int nn_block_pre_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const int64_t count = b.rows * b.channels;
    const nn_values dout = nn_values_of(&call->grad_out[0]);
    const nn_dest narrow = nn_dest_of(s.narrow, 0.0f);
    const nn_dest stream = nn_dest_of(s.residual, 1.0f);
    int result = b.device->copy(call, nn_dest_of(s.residual, 0.0f), dout, count);
    if (result == 0) {
        result = nn_block_mlp_backward(&b, &s, narrow, dout, b.saved[NN_S_NORM2]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, stream, s.narrow,
                                        b.saved[NN_S_SUM1], s.work);
    }
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, narrow, s.residual, b.saved[NN_S_NORM1]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, stream, s.narrow,
                                        nn_values_of(&call->in[0]), s.work);
    }
    return result != 0 ? result
                       : b.device->copy(call, nn_gradient_of(&call->grad_in[0]), s.residual, count);
}

NN_API int nn_block_post_forward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_values x = nn_values_of(&call->in[0]);
    const nn_values sum1 = b.saved[NN_S_SUM1];
    const nn_values norm1 = b.saved[NN_S_NORM1];
    const nn_values sum2 = b.saved[NN_S_SUM2];
    int result = nn_block_attend(&b, sum1, x, x);
    if (result == 0) {
        result = nn_block_norm(&b, NN_P_NORM1, NN_S_MEAN1, norm1, sum1);
    }
    if (result == 0) {
        result = nn_block_mlp(&b, sum2, norm1, norm1);
    }
    return result != 0
               ? result
               : nn_block_norm(&b, NN_P_NORM2, NN_S_MEAN2, nn_values_of(&call->out[0]), sum2);
}

NN_API int nn_block_post_backward(const ms_call *call) {
    const nn_block b = nn_block_of(call);
    const nn_block_scratch s = nn_block_scratch_of(&b);
    const nn_dest set = nn_dest_of(s.residual, 0.0f);
    const nn_dest stream = nn_dest_of(s.residual, 1.0f);
    int result =
        nn_block_norm_backward(&b, NN_P_NORM2, NN_S_MEAN2, set, nn_values_of(&call->grad_out[0]),
                               b.saved[NN_S_SUM2], s.work);
    if (result == 0) {
        result = nn_block_mlp_backward(&b, &s, stream, s.residual, b.saved[NN_S_NORM1]);
    }
    if (result == 0) {
        result = nn_block_norm_backward(&b, NN_P_NORM1, NN_S_MEAN1, set, s.residual,
                                        b.saved[NN_S_SUM1], s.work);
    }
    if (result == 0) {
        result = nn_block_attend_backward(&b, &s, stream, s.residual, nn_values_of(&call->in[0]));
    }
    return result != 0 ? result
                       : b.device->copy(call, nn_gradient_of(&call->grad_in[0]), s.residual,
                                        b.rows * b.channels);
}

// ------------------------------------------------------------------------------------------------
// >>nn adapters

NN_API ms_tensor nn_adapter(nn_net *net, const char *name, ms_tensor x, ms_tensor y, int64_t rank) {
    const int64_t in = nn_last(ms_tensor_shape(net->model, x));
    const int64_t out = nn_last(ms_tensor_shape(net->model, y));
    const nn_name down = nn_join(name, "adapter.down"), up = nn_join(name, "adapter.up");
    const ms_tensor none = {0};
    const ms_tensor first = nn_param(net, nn_join(down.text, "weight").text, ms_shape2(rank, in),
                                     NN_INIT_NORMAL, 0.02f);
    const ms_tensor second =
        nn_param(net, nn_join(up.text, "weight").text, ms_shape2(out, rank), NN_INIT_ZEROS, 0.0f);
    const ms_tensor inner = nn_linear_tied(net, down.text, x, first, none);
    const ms_tensor change = nn_linear_tied(net, up.text, inner, second, none);
    return nn_add(net, nn_join(name, "adapted").text, y, change);
}

NN_API void nn_freeze(nn_net *net) {
    for (int64_t i = 0; i < nn_param_count(net); i++) {
        const nn_param_info *info = nn_param_at(net, i);
        if (!nn_is_adapter(info)) {
            ms_set_frozen(net->model, info->tensor, true);
        }
    }
}

#include "nn_models.h"

#endif // MEMSCALE_NN_H
