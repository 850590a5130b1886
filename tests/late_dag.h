/*  late_dag.h - random graphs whose layers run on the virtual device or, with emulation/on_cuda.h, late
    on the emulated GPU. Include it after random_dag.h and virtual.h. */
#ifndef LATE_DAG_H
#define LATE_DAG_H

static inline ms_layer_desc ld_move(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    return v_wrap(desc, (v_layer *)layers + layer);
}

/* Makes a graph one for the virtual device: no binding, which does not run late, and no update of
   the trainer's own. There are RD_LAYERS layers. */
static inline rd_graph *ld_make_late(rd_graph *g, v_layer *layers) {
    for (uint32_t i = 0; i < g->layer_count; ++i) {
        g->layer[i].has_bind = false;
    }
    if (g->optimizer.kind == MS_OPTIMIZER_CUSTOM) {
        g->optimizer.kind = MS_OPTIMIZER_SGD;
        g->optimizer.state_count = 0;
        g->optimizer.momentum = 0.5f;
    }
    g->move = ld_move;
    g->mover = layers;
    return g;
}

#if defined ON_CUDA_H && defined CUDART_EMULATION
static inline int ld_call(const ms_call *call, ms_layer_fn function) {
    ms_call inner = *call;
    inner.user = ((const v_layer *)call->user)->user;
    return t_cuda_enqueue(function, &inner);
}

static inline int ld_forward(const ms_call *call) {
    return ld_call(call, ((const v_layer *)call->user)->forward);
}

static inline int ld_backward(const ms_call *call) {
    return ld_call(call, ((const v_layer *)call->user)->backward);
}

static inline int ld_recompute(const ms_call *call) {
    return ld_call(call, ((const v_layer *)call->user)->recompute);
}

static inline ms_layer_desc ld_move_later(void *layers, uint32_t layer, const ms_layer_desc *desc) {
    ms_layer_desc d = v_wrap(desc, (v_layer *)layers + layer);
    d.forward = ld_forward;
    d.backward = d.backward != NULL ? ld_backward : NULL;
    d.recompute = d.recompute != NULL ? ld_recompute : NULL;
    return d;
}

/* Makes a graph that ld_make_late has made one for the emulated GPU. */
static inline void ld_make_later(rd_graph *g, v_layer *layers) {
    t_cuda_mark(ld_forward);
    t_cuda_mark(ld_backward);
    t_cuda_mark(ld_recompute);
    g->move = ld_move_later;
    g->mover = layers;
}
#endif

#endif // LATE_DAG_H
