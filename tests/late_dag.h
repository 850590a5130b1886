/*  late_dag.h - random graphs whose layers run on the virtual device. Include it after random_dag.h
    and virtual.h. */
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

#endif // LATE_DAG_H
