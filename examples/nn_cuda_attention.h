/*  nn_cuda_attention.h - attention with CUDA.

        >>nn cuda attention       with the probabilities of whole rows
        >>nn cuda tiles           attention whose scratch memory does not grow with the square of the sequence

    A part of nn_cuda.h, which includes it after nn_cuda_layers.h. */
#ifndef MEMSCALE_NN_CUDA_ATTENTION_H
#define MEMSCALE_NN_CUDA_ATTENTION_H

#ifndef MEMSCALE_NN_CUDA_H
#error "include nn.h, which includes nn_cuda.h"
#endif

// ------------------------------------------------------------------------------------------------
// >>nn cuda attention

/* The products are computed for one group of heads after another. The probabilities of a group,
   about NN_GROUP_FLOATS, are in scratch memory at once; they also stay in the cache of a large GPU.
   In place: a group is some heads of one sequence; products read its queries, keys and values in
   qkv.
   Packed: if the heads of one sequence are too small to keep a GPU busy, a group is all heads of
   some sequences; their queries, keys and values are first copied head by head, so that one batched
   product computes them all. Which of the two it is depends on sizes alone.
   Probabilities and their gradients are computed in F32. If qkv has 16 bits, each row is then
   rounded to where it begins in scratch memory, or to where the probabilities are kept. Packed
   gradients are F32 in every call. */
typedef struct nn_groups {
    bool packed;
    int64_t count, size; // groups, and sequences or heads of keys in each but the last
} nn_groups;

/* Whether groups are packed: the products of one sequence's heads have too few tiles. */
NN_API bool nn_cuda_packs(nn_attention_size n) {
    const int64_t tiles = nn_divide_up(n.sequence, NN_TILE);
    return n.batch > 1 && tiles * tiles * n.heads < NN_BUSY_TILES;
}

static nn_groups nn_cuda_groups(nn_attention_size n) {
    nn_groups g;
    g.packed = nn_cuda_packs(n);
    const int64_t all = g.packed ? n.batch : n.heads;
    const int64_t floats = g.packed ? nn_cuda_sequence_floats(n) : nn_cuda_head_floats(n);
    const int64_t count = nn_divide_up(all, nn_most(1, nn_least(all, NN_GROUP_FLOATS / floats)));
    g.size = nn_divide_up(all, count);
    g.count = nn_divide_up(all, g.size) * (g.packed ? 1 : n.batch);
    return g;
}

/* Copies between parts of the rows of tokens, (sequences, sequence), row_stride apart, and the
   matrices of heads, (sequences * heads, sequence, size) for each part. Several matrices can have
   one head of a row in common: back in the row it is their sum. */
typedef struct nn_heads_copy {
    nn_values rows;
    nn_values part[3]; // as many as parts
    int64_t offset[3]; // of the part in a row
    int64_t shared[3]; // matrices that have one head of the row in common
    int64_t sequences, sequence, parts, row_stride;
    int64_t heads, size; // matrices of a sequence
    bool packs;          // from rows to matrices; otherwise back
    bool adds;
} nn_heads_copy;

/* T: of rows; P: of the parts, T or float. */
template <typename T, typename P, unsigned WIDE>
static __global__ void __launch_bounds__(NN_THREADS) nn_k_heads_copy(nn_heads_copy h) {
    const unsigned parts = (unsigned)h.parts; // 32 bits, as blocks are counted
    const unsigned part = blockIdx.x % parts;
    const unsigned token = blockIdx.x / parts;
    const unsigned sequence = token / (unsigned)h.sequence;
    const unsigned time = token % (unsigned)h.sequence;
    T *row = (T *)h.rows.data + token * h.row_stride + h.offset[part];
    const unsigned shared = (unsigned)h.shared[part]; // 32 bits: divided for each element
    const unsigned columns = (unsigned)(h.heads * h.size) / shared;
    const unsigned size = (unsigned)h.size;
    for (unsigned c = threadIdx.x * WIDE; c < columns; c += NN_THREADS * WIDE) {
        const unsigned head = c / size * shared;
        const int64_t matrix_row = ((int64_t)sequence * h.heads + head) * h.sequence + time;
        P *own = (P *)h.part[part].data + matrix_row * h.size + c % size;
        const int64_t apart = h.sequence * h.size; // of matrices
        float value[WIDE];
        float old[WIDE] = {0};
        if (h.packs) {
            nn_wide<WIDE>::load(value, row + c);
            for (unsigned i = 0; i < shared; i++) {
                nn_wide<WIDE>::store(own + i * apart, value);
            }
            continue;
        }
        nn_wide<WIDE>::load(value, own);
        for (unsigned i = 1; i < shared; i++) {
            float other[WIDE];
            nn_wide<WIDE>::load(other, own + i * apart);
            NN_UNROLL
            for (unsigned k = 0; k < WIDE; k++) {
                value[k] += other[k];
            }
        }
        if (h.adds) {
            nn_wide<WIDE>::load(old, row + c);
        }
        NN_UNROLL
        for (unsigned k = 0; k < WIDE; k++) {
            value[k] = h.adds ? nn_d_sum(old[k], value[k]) : value[k];
        }
        nn_wide<WIDE>::store(row + c, value);
    }
}

template <typename T, typename P>
static int nn_cuda_heads_copy_of(const ms_call *call, const nn_heads_copy &h) {
    bool wide = h.size % nn_type<T>::WIDE == 0 && nn_aligned(h.rows.data);
    for (int64_t p = 0; p < h.parts; p++) { // offsets and strides are multiples of the size
        wide = wide && nn_aligned(h.part[p].data);
    }
    return nn_launch(call, nn_grid_of(h.sequences * h.sequence * h.parts, 1, NN_THREADS),
                     wide ? nn_k_heads_copy<T, P, nn_type<T>::WIDE> : nn_k_heads_copy<T, P, 1>, h);
}

template <typename T>
static int nn_cuda_heads_copy_as(const ms_call *call, const nn_heads_copy &h) {
    return h.part[0].dtype == h.rows.dtype ? nn_cuda_heads_copy_of<T, T>(call, h)
                                           : nn_cuda_heads_copy_of<T, float>(call, h);
}

/* Matrices (sequence, size), one per head, head_stride apart; their rows are stride apart. */
typedef struct nn_heads {
    nn_values values;
    int64_t stride, head_stride;
} nn_heads;

/* Probabilities of heads, or their gradients, (heads, sequence, sequence): F32 where they are
   computed; then operands of products. computed NULL: they are not. */
typedef struct nn_square {
    float *computed;
    nn_values rounded; // in F32 the same
    int64_t stride;    // of the rows of rounded
} nn_square;

/* A group, and where its operands are. The products of forward read q, k and v and write o; those
   of backward read q, k, v and o, and write dq, dk and dv: beta times the old values, plus
   gradients. */
typedef struct nn_group {
    const ms_call *call;
    nn_attention_size n;
    bool packed;
    int64_t heads;       // in the group
    int64_t first, head; // the sequence, and the head of it, that it begins with
    int64_t sequences;   // in the group; 1 unless it is packed
    nn_heads q, k, v, o; // o: the output, or in backward its gradient
    nn_heads dq, dk, dv; // backward
    nn_square p, dp;     // dp in backward
    float *spare;        // scratch memory that is not in use yet
} nn_group;

static nn_heads nn_heads_of(nn_values values, int64_t stride, int64_t head_stride) {
    nn_heads heads;
    heads.values = values;
    heads.stride = stride;
    heads.head_stride = head_stride;
    return heads;
}

/* Takes floats of the scratch memory, aligned as it is. */
static float *nn_cuda_take(nn_group *g, int64_t floats) {
    float *taken = g->spare;
    g->spare += nn_divide_up(floats, 16) * 16;
    return taken;
}

/* Scratch memory for a square that is kept nowhere. */
static nn_square nn_cuda_square(nn_group *g, ms_dtype dtype) {
    nn_square s;
    s.computed = nn_cuda_take(g, g->heads * g->n.sequence * g->n.sequence);
    s.rounded = nn_values_in(s.computed, dtype);
    s.stride = dtype == MS_DTYPE_F32 ? g->n.sequence : 2 * g->n.sequence;
    return s;
}

/* A group without its operands. */
static nn_group nn_group_at(const ms_call *call, int64_t index, nn_groups groups, float *work,
                            nn_attention_size n) {
    nn_group g;
    memset(&g, 0, sizeof g);
    const int64_t per_sequence = groups.packed ? 1 : groups.count / n.batch;
    const int64_t begin = index % (groups.packed ? groups.count : per_sequence) * groups.size;
    g.call = call;
    g.n = n;
    g.packed = groups.packed;
    g.spare = work;
    g.first = groups.packed ? begin : index / per_sequence;
    const int64_t shared = nn_attention_shared(&n);
    g.head = groups.packed ? 0 : begin * shared;
    g.sequences = groups.packed ? nn_least(groups.size, n.batch - begin) : 1;
    g.heads =
        groups.packed ? g.sequences * n.heads : nn_least(groups.size, n.kv_heads - begin) * shared;
    return g;
}

/* A group of this dtype with its probabilities. scores.data NULL: they are not kept. */
static nn_group nn_cuda_group(const ms_call *call, int64_t index, nn_groups groups,
                              nn_values scores, ms_dtype dtype, float *work, nn_attention_size n) {
    nn_group g = nn_group_at(call, index, groups, work, n);
    if (scores.data == NULL) {
        g.p = nn_cuda_square(&g, dtype);
        return g;
    }
    g.p.rounded = nn_from(scores, (g.first * n.heads + g.head) * n.sequence * n.sequence);
    g.p.computed = dtype == MS_DTYPE_F32 ? (float *)g.p.rounded.data : NULL;
    g.p.stride = n.sequence;
    return g;
}

/* Sets q, k, v and o to their places in qkv and out. Keys and values that heads share have none that
   products could read for all heads at once. */
static void nn_group_in_place(nn_group *g, nn_values qkv, nn_values out) {
    const nn_attention_size *n = &g->n;
    const int64_t token = g->first * n->sequence, column = g->head * n->size;
    const int64_t stride = nn_attention_columns(n), width = nn_attention_width(n);
    const int64_t shared = column / nn_attention_shared(n);
    const nn_values row = nn_from(qkv, token * stride);
    g->q = nn_heads_of(nn_from(row, column), stride, n->size);
    g->k = nn_heads_of(nn_from(row, nn_attention_keys(n) + shared), stride, n->size);
    g->v = nn_heads_of(nn_from(row, nn_attention_values(n) + shared), stride, n->size);
    g->o = nn_heads_of(nn_from(out, token * width + column), width, n->size);
}

/* Scratch memory for one packed operand; enough for F32, whatever it is. */
static nn_heads nn_group_room(nn_group *g, ms_dtype dtype) {
    const int64_t floats = g->n.sequence * g->n.size;
    const float *room = nn_cuda_take(g, g->heads * floats);
    return nn_heads_of(nn_values_in(room, dtype), g->n.size, floats);
}

/* An F32 gradient in the place of a packed operand. */
static nn_heads nn_heads_f32(nn_heads heads) {
    heads.values.dtype = MS_DTYPE_F32;
    return heads;
}

/* A copy between the group's rows of x, `stride` apart, and matrices of its heads. */
static nn_heads_copy nn_group_copy(const nn_group *g, nn_values x, int64_t stride) {
    nn_heads_copy h;
    memset(&h, 0, sizeof h);
    h.rows = nn_from(x, g->first * g->n.sequence * stride);
    h.sequences = g->sequences;
    h.sequence = g->n.sequence;
    h.row_stride = stride;
    h.heads = g->packed ? g->n.heads : g->heads;
    h.size = g->n.size;
    return h;
}

static void nn_copy_part(nn_heads_copy *h, const nn_heads *part, int64_t offset, int64_t shared) {
    h->part[h->parts] = part->values;
    h->offset[h->parts] = offset;
    h->shared[h->parts] = shared;
    h->parts++;
}

/* Copies queries, keys and values, those that are not NULL, from qkv to packed operands, or back. */
static int nn_group_copy_qkv(const nn_group *g, nn_values qkv, const nn_heads *q, const nn_heads *k,
                             const nn_heads *v, bool packs, float beta) {
    const nn_attention_size *n = &g->n;
    const int64_t shared = nn_attention_shared(n), column = g->head * n->size;
    nn_heads_copy h = nn_group_copy(g, qkv, nn_attention_columns(n));
    h.packs = packs;
    h.adds = beta != 0.0f;
    if (q != NULL) {
        nn_copy_part(&h, q, column, 1);
    }
    if (k != NULL) {
        nn_copy_part(&h, k, nn_attention_keys(n) + column / shared, shared);
        nn_copy_part(&h, v, nn_attention_values(n) + column / shared, shared);
    }
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* Copies the output, or its gradient, to a packed operand, or back. */
static int nn_group_copy_out(const nn_group *g, nn_values out, const nn_heads *o, bool packs) {
    nn_heads_copy h = nn_group_copy(g, out, nn_attention_width(&g->n));
    h.packs = packs;
    nn_copy_part(&h, o, g->head * g->n.size, 1);
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* The operands of a product. */
static ms_matrix nn_group_matrix(const nn_group *g, nn_heads heads) {
    ms_matrix m = nn_matrix(heads.values, g->n.sequence, g->n.size, heads.stride);
    m.batch_count = g->heads;
    m.batch_stride = heads.head_stride;
    return m;
}

static ms_matrix nn_group_square(const nn_group *g, nn_values values, int64_t stride) {
    ms_matrix m = nn_matrix(values, g->n.sequence, g->n.sequence, stride);
    m.batch_count = g->heads;
    m.batch_stride = g->n.sequence * stride;
    return m;
}

/* The kernel rounds the square, and may read p. */
static nn_rowwise nn_group_rows(const nn_group *g, const nn_square *square, const nn_square *p) {
    nn_norm n;
    memset(&n, 0, sizeof n);
    n.rows = g->heads * g->n.sequence;
    n.width = g->n.sequence;
    nn_rowwise w = nn_rowwise_of(square->rounded, nn_f32(square->computed), nn_f32(NULL), &n);
    w.out_stride = square->stride;
    if (p != NULL) {
        w.b = p->rounded;
        w.b_stride = p->stride;
    }
    w.scale = g->n.scale;
    w.causal = g->n.causal;
    return w;
}

/* p = softmax(q k^T * scale); the product also multiplies by the factor. */
static int nn_group_softmax(const nn_group *g) {
    const nn_rowwise w = nn_group_rows(g, &g->p, NULL);
    const int result = (int)ms_gemm(g->call, w.scale, nn_group_matrix(g, g->q),
                                    ms_transpose(nn_group_matrix(g, g->k)), 0.0f,
                                    nn_group_square(g, nn_f32(g->p.computed), g->n.sequence));
    return result != 0 ? result : nn_cuda_rows<nn_row_softmax>(g->call, w, nn_k_softmax);
}

static int nn_group_forward(nn_group *g, nn_values out, nn_values qkv) {
    int result = 0;
    if (g->p.computed == NULL) { // kept in 16 bits
        g->p.computed = nn_cuda_take(g, g->heads * g->n.sequence * g->n.sequence);
    }
    if (g->packed) {
        g->q = nn_group_room(g, qkv.dtype);
        g->k = nn_group_room(g, qkv.dtype);
        g->v = nn_group_room(g, qkv.dtype);
        g->o = g->q; // no product reads both
        result = nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f);
    } else {
        nn_group_in_place(g, qkv, out);
    }
    if (result == 0) {
        result = nn_group_softmax(g);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, nn_group_square(g, g->p.rounded, g->p.stride),
                              nn_group_matrix(g, g->v), 0.0f, nn_group_matrix(g, g->o));
    }
    return result != 0 || !g->packed ? result : nn_group_copy_out(g, out, &g->o, false);
}

static int nn_cuda_attention(const ms_call *call, nn_values out, nn_values scores, nn_values qkv,
                             float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, scores, qkv.dtype, work, n);
        result = nn_group_forward(&g, out, qkv);
    }
    return result;
}

/* Scratch memory of the gradients, in place of operands that no later product reads. If the group
   is not packed, the queries are copied first, as dqkv may be qkv: dq is then written over the
   queries, which the product for dk still reads. */
static int nn_group_operands(nn_group *g, nn_dest dqkv, nn_values dout, nn_values qkv) {
    nn_group gradient = *g;
    g->dp = nn_cuda_square(g, qkv.dtype);
    if (!g->packed) {
        nn_group_in_place(&gradient, nn_values_at(dqkv), dout);
        g->dq = gradient.q;
        g->dk = gradient.k;
        g->dv = gradient.v;
        nn_group_in_place(g, qkv, dout);
        g->q = nn_group_room(g, qkv.dtype);
        return nn_group_copy_qkv(g, qkv, &g->q, NULL, NULL, true, 0.0f);
    }
    g->q = nn_group_room(g, qkv.dtype);
    g->k = nn_group_room(g, qkv.dtype);
    g->v = nn_group_room(g, qkv.dtype);
    g->o = nn_group_room(g, qkv.dtype);
    g->dq = nn_heads_f32(g->o);
    g->dk = nn_heads_f32(g->k);
    g->dv = nn_heads_f32(g->v);
    return nn_first(nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f),
                    nn_group_copy_out(g, dout, &g->o, true));
}

/* dp = do v^T, dv = p^T do, ds from dp, dq = ds k, dk = ds^T q, in this order. */
static int nn_group_backward(nn_group *g, float beta) {
    const ms_matrix p = nn_group_square(g, g->p.rounded, g->p.stride);
    const ms_matrix dp = nn_group_square(g, nn_f32(g->dp.computed), g->n.sequence);
    const ms_matrix ds = nn_group_square(g, g->dp.rounded, g->dp.stride);
    const ms_matrix slope = nn_group_matrix(g, g->o);
    int result =
        (int)ms_gemm(g->call, 1.0f, slope, ms_transpose(nn_group_matrix(g, g->v)), 0.0f, dp);
    if (result == 0) {
        result =
            (int)ms_gemm(g->call, 1.0f, ms_transpose(p), slope, beta, nn_group_matrix(g, g->dv));
    }
    if (result == 0) {
        result = nn_cuda_rows<nn_row_softmax_backward>(g->call, nn_group_rows(g, &g->dp, &g->p),
                                                       nn_k_softmax_backward);
    }
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, ds, nn_group_matrix(g, g->k), beta,
                              nn_group_matrix(g, g->dq));
    }
    return result != 0 ? result
                       : (int)ms_gemm(g->call, 1.0f, ms_transpose(ds), nn_group_matrix(g, g->q),
                                      beta, nn_group_matrix(g, g->dk));
}

static int nn_cuda_attention_backward(const ms_call *call, nn_dest dqkv, nn_values dout,
                                      nn_values scores, nn_values qkv, float *work,
                                      nn_attention_size n) {
    const nn_groups groups = nn_cuda_groups(n);
    int result = 0;
    if (dqkv.data == NULL) {
        return 0;
    }
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_cuda_group(call, i, groups, scores, qkv.dtype, work, n);
        result = nn_group_operands(&g, dqkv, dout, qkv);
        if (result == 0) {
            result = nn_group_backward(&g, g.packed ? 0.0f : dqkv.beta);
        }
        if (result == 0 && g.packed) {
            result =
                nn_group_copy_qkv(&g, nn_values_at(dqkv), &g.dq, &g.dk, &g.dv, false, dqkv.beta);
        }
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// >>nn cuda tiles  attention whose scratch memory does not grow with the square of the sequence

/* Dao et al., "FlashAttention", 2022, algorithms 1 and 4, with tiles so large that each product of
   theirs is one batched product for a group of heads, as above; between these, a kernel has a warp
   for each row of a tile. Groups are packed only if a sequence is a single tile. Tiles of keys that
   none of their queries sees are left out. */
static nn_groups nn_cuda_tiled_groups(nn_attention_size n, bool backward) {
    nn_groups g;
    g.packed = nn_cuda_packs(n) && nn_cuda_tile_side(n) == n.sequence;
    const int64_t all = g.packed ? n.batch : n.kv_heads;
    const int64_t floats =
        g.packed ? nn_cuda_tiled_sequence_floats(n, backward) : nn_cuda_shared_floats(n, backward);
    const int64_t count = nn_divide_up(all, nn_most(1, nn_least(all, NN_GROUP_FLOATS / floats)));
    g.size = nn_divide_up(all, count);
    g.count = nn_divide_up(all, g.size) * (g.packed ? 1 : n.batch);
    return g;
}

/* A tile of each head of a group, and what the kernels between products need of them. A row is a
   query of a head; rows of a tile are stride floats apart. */
typedef struct nn_tile_rows {
    int64_t heads, head;  // in the group, and the first of them among all sequences'
    int64_t heads_of_all; // of a sequence
    int64_t sequence, size;
    int64_t query, queries, key, keys; // from `query` and `key` on
    int64_t stride;
    bool is_first;             // with these queries
    float *p, *ds;             // (heads, queries, keys); ds in backward
    float *sum, *most, *total; // (heads, queries): of size elements, and of one
    float *log_sums;           // (B, H, T); in forward it may be NULL
    nn_values out, dout;       // (B, T, C); dout in backward
    int64_t window;
    float scale, cap;
    bool causal;
} nn_tile_rows;

/* Where a row of the tile is in the output; *sums: and in the logarithms of sums. Numbers of rows
   and heads fit 32 bits, whose division is much faster than that of 64. */
__device__ __forceinline__ int64_t nn_d_tile_place(const nn_tile_rows &w, int64_t row,
                                                   int64_t *sums) {
    const uint32_t queries = (uint32_t)w.queries;
    const uint32_t head = (uint32_t)w.head + (uint32_t)row / queries; // of all sequences
    const uint32_t sequence = head / (uint32_t)w.heads_of_all;
    const int64_t time = w.query + (uint32_t)row % queries;
    *sums = head * w.sequence + time;
    return ((sequence * w.sequence + time) * w.heads_of_all + head % (uint32_t)w.heads_of_all) *
           w.size;
}

/* The keys of the tile that a row sees. */
__device__ __forceinline__ nn_span nn_d_tile_seen(const nn_tile_rows &w, int64_t row) {
    const int64_t end = w.query + (uint32_t)row % (uint32_t)w.queries + 1 - w.key;
    const int64_t begin = w.window > 0 ? end - w.window : 0;
    nn_span seen;
    seen.end = !w.causal || end > w.keys ? w.keys : end < 0 ? 0 : end;
    seen.begin = begin < 0 ? 0 : begin < seen.end ? begin : seen.end;
    return seen;
}

__device__ __forceinline__ bool nn_d_sees(const nn_span &seen, unsigned column) {
    return column >= seen.begin && column < seen.end;
}

__device__ __forceinline__ float nn_d_capped(const nn_tile_rows &w, float score) {
    return w.cap > 0.0f ? nn_cap_value(score, w.cap) : score;
}

/* Scores become exponentials relative to the row's largest score so far, each row rounded to where
   it begins; what has been summed relative to a smaller one is scaled. */
struct nn_row_tile_softmax {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        const nn_span seen = nn_d_tile_seen(w, row);
        const float before = w.is_first ? -FLT_MAX : w.most[row];
        float v[ITEMS];
        float most = before;
        float total = 0.0f;
        team.load(v, w.p + row * w.stride, seen.end);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] = nn_d_capped(w, v[i]);
            most = nn_d_sees(seen, team.column(i)) ? fmaxf(most, v[i]) : most;
        }
        most = team.most(most);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            v[i] = nn_d_sees(seen, team.column(i)) ? nn_exp(v[i] - most) : 0.0f;
            total += v[i];
        }
        total = team.sum(total);
        team.wait();
        team.store((T *)(void *)(w.p + row * w.stride), v, w.keys, false);
        const float share = nn_exp(before - most);
        if (!w.is_first && most > before) {
            for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
                w.sum[row * w.size + i] *= share;
            }
        }
        if (team.lane == 0) {
            w.total[row] = w.is_first ? total : w.total[row] * share + total;
            w.most[row] = most;
        }
    }
};

/* Divides the sums of a tile's queries, when all keys have gone by. */
struct nn_row_tile_close {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        int64_t sums;
        T *out = (T *)w.out.data + nn_d_tile_place(w, row, &sums);
        const float share = nn_share(w.most[row], w.total[row]);
        for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
            nn_d_round(out + i, w.sum[row * w.size + i] * share);
        }
        if (team.lane == 0 && w.log_sums != NULL) {
            w.log_sums[sums] = nn_log_sum(w.most[row], w.total[row]);
        }
    }
};

/* Scores p become probabilities, and their gradients ds those of q k^T: each probability times what
   its gradient exceeds the sum of out * dout by. Both are rounded to where their rows begin. */
struct nn_row_tile_slopes {
    template <typename T, unsigned ITEMS, unsigned WIDE>
    static __device__ __forceinline__ void run(const nn_team<NN_WARP, ITEMS, WIDE> &team,
                                               const nn_tile_rows &w, int64_t row) {
        const nn_span seen = nn_d_tile_seen(w, row);
        int64_t sums;
        const int64_t place = nn_d_tile_place(w, row, &sums);
        const float log_sum = w.log_sums[sums];
        float p[ITEMS];
        float ds[ITEMS];
        float mean = 0.0f;
        for (int64_t i = team.lane; i < w.size; i += NN_WARP) {
            mean += nn_d_float(((const T *)w.out.data)[place + i]) *
                    nn_d_float(((const T *)w.dout.data)[place + i]);
        }
        mean = team.sum(mean);
        team.load(p, w.p + row * w.stride, seen.end);
        team.load(ds, w.ds + row * w.stride, seen.end);
        NN_UNROLL
        for (unsigned i = 0; i < ITEMS; i++) {
            const bool sees = nn_d_sees(seen, team.column(i));
            const float score = nn_d_capped(w, p[i]);
            p[i] = sees ? nn_exp(score - log_sum) : 0.0f;
            ds[i] = sees ? p[i] * (ds[i] - mean) * w.scale : 0.0f;
            ds[i] *= w.cap > 0.0f ? nn_cap_slope(score, w.cap) : 1.0f;
        }
        team.wait();
        team.store((T *)(void *)(w.p + row * w.stride), p, w.keys, false);
        team.store((T *)(void *)(w.ds + row * w.stride), ds, w.keys, false);
    }
};

template <typename F, typename T, unsigned ITEMS, unsigned WIDE>
static __global__ void __launch_bounds__(NN_ROW_WARPS *NN_WARP) nn_k_tile(nn_tile_rows w) {
    const int64_t row = (int64_t)blockIdx.x * NN_ROW_WARPS + threadIdx.x / NN_WARP;
    nn_team<NN_WARP, ITEMS, WIDE> team;
    team.lane = threadIdx.x % NN_WARP;
    team.shared = NULL;
    if (row < w.heads * w.queries) {
        F::template run<T>(team, w, row);
    }
}

/* Launches the kernel that holds rows of this width in the fewest registers. Rows of tiles are
   aligned and padded, so that all accesses are wide. */
template <typename T, typename F>
static int nn_cuda_tile_as(const ms_call *call, const nn_tile_rows &w, F) {
    enum { WIDE = nn_type<T>::WIDE };
    const nn_grid grid =
        nn_grid_of(nn_divide_up(w.heads * w.queries, NN_ROW_WARPS), 1, NN_ROW_WARPS * NN_WARP);
    return nn_launch(call, grid,
                     w.keys <= 8 * NN_WARP    ? nn_k_tile<F, T, 8, WIDE>
                     : w.keys <= 16 * NN_WARP ? nn_k_tile<F, T, 16, WIDE>
                                              : nn_k_tile<F, T, 32, WIDE>,
                     w);
}

template <typename F> static int nn_cuda_tile_rows(const ms_call *call, const nn_tile_rows &w) {
    return NN_AS(w.out.dtype, nn_cuda_tile_as, call, w, F());
}

/* The first of the keys of the first tile with the queries from `query` on. */
static int64_t nn_group_tile_begin(const nn_group *g, int64_t query) {
    const int64_t side = nn_cuda_tile_side(g->n);
    return nn_first_key(&g->n, query) / side * side;
}

/* A tile of a group, from `query` and `key` on. */
static nn_tile_rows nn_group_tile_at(const nn_group *g, nn_tile_rows w, int64_t query,
                                     int64_t key) {
    const int64_t side = nn_cuda_tile_side(g->n);
    w.query = query;
    w.queries = nn_least(side, g->n.sequence - query);
    w.key = key;
    w.keys = nn_least(side, nn_keys_end(&g->n, query + w.queries - 1) - key);
    w.is_first = key == nn_group_tile_begin(g, query);
    w.stride = nn_cuda_tile_stride(w.keys);
    return w;
}

/* What all tiles of a group have in common. */
static nn_tile_rows nn_tile_rows_of(const nn_group *g, nn_values out, float *log_sums) {
    nn_tile_rows w;
    memset(&w, 0, sizeof w);
    w.heads = g->heads;
    w.head = g->first * g->n.heads + g->head;
    w.heads_of_all = g->n.heads;
    w.sequence = g->n.sequence;
    w.size = g->n.size;
    w.out = out;
    w.log_sums = log_sums;
    w.window = g->n.window;
    w.scale = g->n.scale;
    w.cap = g->n.cap;
    w.causal = g->n.causal;
    return w;
}

/* The rows of operands or gradients from `begin` on. */
static ms_matrix nn_group_part(const nn_group *g, nn_heads heads, int64_t begin, int64_t rows) {
    ms_matrix m =
        nn_matrix(nn_from(heads.values, begin * heads.stride), rows, g->n.size, heads.stride);
    m.batch_count = g->heads;
    m.batch_stride = heads.head_stride;
    return m;
}

/* The tile, as it is computed (F32), or as an operand of products in this dtype. */
static ms_matrix nn_group_tile(const nn_tile_rows *w, const float *tile, ms_dtype dtype) {
    const int64_t stride = dtype == MS_DTYPE_F32 ? w->stride : 2 * w->stride;
    ms_matrix m = nn_matrix(nn_values_in(tile, dtype), w->queries, w->keys, stride);
    m.batch_count = w->heads;
    m.batch_stride = w->queries * stride;
    return m;
}

/* F32 sums (heads, rows, size) of gradients or outputs. */
static nn_heads nn_group_sums(const nn_group *g, const float *sums, int64_t rows) {
    return nn_heads_of(nn_f32(sums), g->n.size, rows * g->n.size);
}

/* p = q k^T * scale */
static int nn_group_scores(const nn_group *g, const nn_tile_rows *w) {
    return (int)ms_gemm(g->call, w->scale, nn_group_part(g, g->q, w->query, w->queries),
                        ms_transpose(nn_group_part(g, g->k, w->key, w->keys)), 0.0f,
                        nn_group_tile(w, w->p, MS_DTYPE_F32));
}

/* The outputs of a tile's queries. */
static int nn_group_tile_forward(const nn_group *g, nn_tile_rows w, int64_t query) {
    const ms_dtype dtype = w.out.dtype;
    int result = 0;
    w = nn_group_tile_at(g, w, query, nn_group_tile_begin(g, query));
    while (w.keys > 0 && result == 0) {
        result = nn_group_scores(g, &w);
        if (result == 0) {
            result = nn_cuda_tile_rows<nn_row_tile_softmax>(g->call, w);
        }
        if (result == 0) {
            result =
                (int)ms_gemm(g->call, 1.0f, nn_group_tile(&w, w.p, dtype),
                             nn_group_part(g, g->v, w.key, w.keys), w.is_first ? 0.0f : 1.0f,
                             nn_group_part(g, nn_group_sums(g, w.sum, w.queries), 0, w.queries));
        }
        w = nn_group_tile_at(g, w, query, w.key + nn_cuda_tile_side(g->n));
    }
    w = nn_group_tile_at(g, w, query, 0);
    return result != 0 ? result : nn_cuda_tile_rows<nn_row_tile_close>(g->call, w);
}

/* Sets q, k and v, and in backward o, to the gradient of the output: in place, or packed. Of a group
   in place, keys and values that heads share are copied. */
static int nn_group_inputs(nn_group *g, nn_values qkv, nn_values out, bool backward) {
    if (!g->packed) {
        nn_group_in_place(g, qkv, out);
        if (g->n.kv_heads == g->n.heads) {
            return 0;
        }
        g->k = nn_group_room(g, qkv.dtype);
        g->v = nn_group_room(g, qkv.dtype);
        return nn_group_copy_qkv(g, qkv, NULL, &g->k, &g->v, true, 0.0f);
    }
    g->q = nn_group_room(g, qkv.dtype);
    g->k = nn_group_room(g, qkv.dtype);
    g->v = nn_group_room(g, qkv.dtype);
    const int result = nn_group_copy_qkv(g, qkv, &g->q, &g->k, &g->v, true, 0.0f);
    if (result != 0 || !backward) {
        return result;
    }
    g->o = nn_group_room(g, qkv.dtype);
    return nn_group_copy_out(g, out, &g->o, true);
}

static int nn_cuda_tiled_attention(const ms_call *call, nn_values out, float *log_sums,
                                   nn_values qkv, float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_tiled_groups(n, false);
    const int64_t side = nn_cuda_tile_side(n);
    int result = 0;
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_group_at(call, i, groups, work, n);
        nn_tile_rows w = nn_tile_rows_of(&g, out, log_sums);
        w.p = nn_cuda_take(&g, g.heads * side * nn_cuda_tile_stride(side));
        w.sum = nn_cuda_take(&g, g.heads * side * n.size);
        w.most = nn_cuda_take(&g, g.heads * side);
        w.total = nn_cuda_take(&g, g.heads * side);
        result = nn_group_inputs(&g, qkv, out, false);
        for (int64_t query = 0; query < n.sequence && result == 0; query += side) {
            result = nn_group_tile_forward(&g, w, query);
        }
    }
    return result;
}

/* Where the gradient of one operand adds up while tiles go by: there, or, if `sums` is not NULL, in
   these, F32 in scratch memory, until it is stored there. beta: of the first product. */
typedef struct nn_group_gradient {
    nn_heads there;
    float *sums;
    float beta;
} nn_group_gradient;

/* There is dqkv, or, if the group is packed, the place of operands that no later product reads; for
   keys and values that heads share, F32 in scratch memory. If dqkv has 16 bits and there are several
   tiles, there are sums: of all queries, and of the keys and values of one tile. */
typedef struct nn_group_gradients {
    nn_group_gradient q, k, v;
    float beta; // of dqkv
} nn_group_gradients;

static nn_group_gradients nn_group_gradients_of(nn_group *g, nn_dest dqkv) {
    const int64_t side = nn_cuda_tile_side(g->n);
    const bool shares = g->n.kv_heads < g->n.heads && !g->packed;
    const bool sums = dqkv.dtype != MS_DTYPE_F32 && side < g->n.sequence;
    nn_group gradient = *g;
    nn_group_gradients to;
    memset(&to, 0, sizeof to);
    nn_group_in_place(&gradient, nn_values_at(dqkv), nn_values_at(dqkv));
    to.q.there = g->packed ? nn_heads_f32(g->o) : gradient.q;
    to.k.there = g->packed ? nn_heads_f32(g->k) : gradient.k;
    to.v.there = g->packed ? nn_heads_f32(g->v) : gradient.v;
    to.beta = dqkv.beta;
    to.q.beta = to.k.beta = to.v.beta = g->packed || sums ? 0.0f : dqkv.beta;
    if (sums) {
        to.q.sums = nn_cuda_take(g, g->heads * g->n.sequence * g->n.size);
    }
    if (shares) {
        to.k.there = nn_heads_f32(nn_group_room(g, MS_DTYPE_F32));
        to.v.there = nn_heads_f32(nn_group_room(g, MS_DTYPE_F32));
        to.k.beta = to.v.beta = 0.0f;
    } else if (sums) {
        to.k.sums = nn_cuda_take(g, g->heads * side * g->n.size);
        to.v.sums = nn_cuda_take(g, g->heads * side * g->n.size);
    }
    return to;
}

/* to (rows from `begin` on) = beta * to + sums (heads, rows, size), of a group in place. */
static int nn_group_store(const nn_group *g, nn_heads to, int64_t begin, int64_t rows,
                          const float *sums, float beta) {
    nn_heads_copy h;
    memset(&h, 0, sizeof h);
    const nn_heads from = nn_group_sums(g, sums, rows);
    h.rows = nn_from(to.values, begin * to.stride);
    nn_copy_part(&h, &from, 0, 1);
    h.sequences = 1;
    h.sequence = rows;
    h.row_stride = to.stride;
    h.heads = g->heads;
    h.size = g->n.size;
    h.adds = beta != 0.0f;
    return NN_AS(h.rows.dtype, nn_cuda_heads_copy_as, g->call, h);
}

/* Adds a * b to the rows of a gradient from `begin` on, of which sums begin with row `first` and have
   `all`. is_first: it is the first product that these rows get. */
static int nn_group_add(const nn_group *g, ms_matrix a, ms_matrix b,
                        const nn_group_gradient *gradient, bool is_first, int64_t first,
                        int64_t all, int64_t begin, int64_t rows) {
    const ms_matrix c =
        gradient->sums != NULL
            ? nn_group_part(g, nn_group_sums(g, gradient->sums, all), begin - first, rows)
            : nn_group_part(g, gradient->there, begin, rows);
    return (int)ms_gemm(g->call, 1.0f, a, b, is_first ? gradient->beta : 1.0f, c);
}

/* Adds what a tile gives to gradients: p and ds, then dv, dq, dk, in this order. */
static int nn_group_tile_backward(const nn_group *g, const nn_tile_rows *w,
                                  const nn_group_gradients *to, bool first) {
    const ms_dtype dtype = w->out.dtype;
    const int64_t all = nn_least(nn_cuda_tile_side(g->n), g->n.sequence - w->key);
    const ms_matrix p = nn_group_tile(w, w->p, dtype);
    const ms_matrix ds = nn_group_tile(w, w->ds, dtype);
    const ms_matrix slope = nn_group_part(g, g->o, w->query, w->queries);
    int result = nn_group_scores(g, w);
    if (result == 0) {
        result = (int)ms_gemm(g->call, 1.0f, slope,
                              ms_transpose(nn_group_part(g, g->v, w->key, w->keys)), 0.0f,
                              nn_group_tile(w, w->ds, MS_DTYPE_F32));
    }
    if (result == 0) {
        result = nn_cuda_tile_rows<nn_row_tile_slopes>(g->call, *w);
    }
    if (result == 0) {
        result =
            nn_group_add(g, ms_transpose(p), slope, &to->v, first, w->key, all, w->key, w->keys);
    }
    if (result == 0) {
        result = nn_group_add(g, ds, nn_group_part(g, g->k, w->key, w->keys), &to->q, w->is_first,
                              0, g->n.sequence, w->query, w->queries);
    }
    return result != 0
               ? result
               : nn_group_add(g, ms_transpose(ds), nn_group_part(g, g->q, w->query, w->queries),
                              &to->k, first, w->key, all, w->key, w->keys);
}

/* All tiles with the keys from `key` on. The first one of them has all these keys. */
static int nn_group_backward_keys(const nn_group *g, const nn_tile_rows *all,
                                  const nn_group_gradients *to, int64_t key) {
    const int64_t side = nn_cuda_tile_side(g->n);
    const int64_t keys = nn_least(side, g->n.sequence - key);
    const int64_t begin = g->n.causal ? key : 0;
    const int64_t end = nn_queries_end(&g->n, key + keys - 1);
    int result = 0;
    for (int64_t query = begin; query < end && result == 0; query += side) {
        const nn_tile_rows w = nn_group_tile_at(g, *all, query, key);
        result = nn_group_tile_backward(g, &w, to, query == begin);
    }
    if (result != 0 || to->k.sums == NULL) {
        return result;
    }
    return nn_first(nn_group_store(g, to->k.there, key, keys, to->k.sums, to->beta),
                    nn_group_store(g, to->v.there, key, keys, to->v.sums, to->beta));
}

static int nn_tiled_group_backward(nn_group *g, nn_dest dqkv, nn_tile_rows w, nn_values qkv) {
    const int64_t side = nn_cuda_tile_side(g->n);
    w.p = nn_cuda_take(g, g->heads * side * nn_cuda_tile_stride(side));
    w.ds = nn_cuda_take(g, g->heads * side * nn_cuda_tile_stride(side));
    int result = nn_group_inputs(g, qkv, w.dout, true);
    const nn_group_gradients to = nn_group_gradients_of(g, dqkv);
    for (int64_t key = 0; key < g->n.sequence && result == 0; key += side) {
        result = nn_group_backward_keys(g, &w, &to, key);
    }
    if (result != 0) {
        return result;
    }
    if (g->packed) {
        return nn_group_copy_qkv(g, nn_values_at(dqkv), &to.q.there, &to.k.there, &to.v.there,
                                 false, dqkv.beta);
    }
    if (to.q.sums != NULL) {
        result = nn_group_store(g, to.q.there, 0, g->n.sequence, to.q.sums, to.beta);
    }
    const bool shares = g->n.kv_heads < g->n.heads;
    return result != 0 || !shares ? result
                                  : nn_group_copy_qkv(g, nn_values_at(dqkv), NULL, &to.k.there,
                                                      &to.v.there, false, dqkv.beta);
}

static int nn_cuda_tiled_attention_backward(const ms_call *call, nn_dest dqkv, nn_values dout,
                                            nn_values out, const float *log_sums, nn_values qkv,
                                            float *work, nn_attention_size n) {
    const nn_groups groups = nn_cuda_tiled_groups(n, true);
    float *sums = (float *)(uintptr_t)log_sums; // only read
    int result = 0;
    if (dqkv.data == NULL) {
        return 0;
    }
    for (int64_t i = 0; i < groups.count && result == 0; i++) {
        nn_group g = nn_group_at(call, i, groups, work, n);
        nn_tile_rows w = nn_tile_rows_of(&g, out, sums);
        w.dout = dout;
        result = nn_tiled_group_backward(&g, dqkv, w, qkv);
    }
    return result;
}

#endif // MEMSCALE_NN_CUDA_ATTENTION_H
