/*  nets.h - nets that are no chains, by their number of layers: DenseNet, U-Net, Inception, ResNet,
    and random graphs. For planning only: the callbacks do nothing. Include memscale.h first.
*/
#ifndef MEMSCALE_BENCH_NETS_H
#define MEMSCALE_BENCH_NETS_H

#include <string.h>

#if defined(__GNUC__)
#define NETS_API static __attribute__((unused))
#else
#define NETS_API static
#endif

typedef enum net_kind {
    NET_DENSENET,  // each unit reads the concatenation of all units before it
    NET_UNET,      // as many layers down as up, with a skip at each of five levels
    NET_INCEPTION, // blocks of four branches of different depth, concatenated
    NET_RESNET,    // blocks of a branch that is added to its input
    NET_RANDOM,    // each layer reads one to three values, more often late ones
    NET_CHAIN,     // each layer reads the one before it; sizes and times are random
    NET_EQUAL,     // a chain of equal layers
    NET_KIND_COUNT
} net_kind;

static const char *const net_names[NET_KIND_COUNT] = {"densenet", "unet",  "inception", "resnet",
                                                      "random",   "chain", "equal"};

enum { NET_OPEN = 16384 };

/* A net that is being registered. A unit of size is 4 KiB of activations. */
typedef struct net_builder {
    ms_model *model;
    uint64_t random;
    uint32_t layers, wanted;
} net_builder;

NETS_API int net_nothing(const ms_call *call) {
    (void)call;
    return 0;
}

NETS_API uint32_t net_below(net_builder *b, uint32_t limit) {
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((b->random >> 33) % limit);
}

NETS_API ms_tensor net_value(net_builder *b, int64_t size) {
    return ms_activation(b->model, "value", MS_DTYPE_F32, ms_shape2(size, 1024));
}

NETS_API int64_t net_size(const net_builder *b, ms_tensor t) {
    return ms_tensor_shape(b->model, t).dim[0];
}

/* Registers a layer that takes so many microseconds for each unit that it reads and writes. */
NETS_API ms_tensor net_layer(net_builder *b, ms_layer_desc *d, double us) {
    ms_layer_time time;
    double size = (double)net_size(b, d->out[0]);
    for (int i = 0; i < MS_LIMIT_IN && d->in[i].id; i++) {
        size += (double)net_size(b, d->in[i]);
    }
    d->forward = d->backward = net_nothing;
    time.forward_us = time.recompute_us = us * size;
    time.backward_us = 2.0 * time.forward_us;
    ms_set_layer_time(b->model, ms_register_layer(b->model, d), &time);
    b->layers++;
    return d->out[0];
}

/* A convolution: its backward reads its input. */
NETS_API ms_tensor net_conv(net_builder *b, ms_tensor in, int64_t size) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "conv";
    d.in[0] = in;
    d.param[0] = ms_param(b->model, "weight", MS_DTYPE_F32, ms_shape2(8, 1024));
    d.out[0] = net_value(b, size);
    d.backward_reads.in = d.backward_reads.param = 1;
    return net_layer(b, &d, 10.0);
}

/* A normalization: its backward reads its input and two saved numbers per channel. */
NETS_API ms_tensor net_norm(net_builder *b, ms_tensor in) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "norm";
    d.in[0] = in;
    d.out[0] = net_value(b, net_size(b, in));
    d.saved[0] = ms_saved(b->model, "moments", MS_DTYPE_F32, ms_shape1(64));
    d.backward_reads.in = d.backward_reads.saved = 1;
    return net_layer(b, &d, 2.0);
}

/* A rectifier: its backward reads its output, which may lie where its input was. */
NETS_API ms_tensor net_relu(net_builder *b, ms_tensor in) {
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "relu";
    d.in[0] = in;
    d.out[0] = net_value(b, net_size(b, in));
    d.in_place[0] = 1;
    d.backward_reads.out = 1;
    return net_layer(b, &d, 1.0);
}

/* A sum or, if `joins`, a concatenation: their backward reads nothing. */
NETS_API ms_tensor net_join(net_builder *b, const ms_tensor *in, uint32_t count, bool joins) {
    ms_layer_desc d;
    int64_t size = 0;
    memset(&d, 0, sizeof d);
    d.name = joins ? "concat" : "add";
    for (uint32_t i = 0; i < count; i++) {
        d.in[i] = in[i];
        size = joins ? size + net_size(b, in[i]) : net_size(b, in[0]);
    }
    d.out[0] = net_value(b, size);
    d.backward_reads.nothing = true;
    return net_layer(b, &d, 1.0);
}

NETS_API ms_tensor net_unit(net_builder *b, ms_tensor x, int64_t size) {
    return net_relu(b, net_norm(b, net_conv(b, x, size)));
}

/* Dense blocks of at most 12 units. A unit concatenates what is there and adds 4 to it. */
NETS_API ms_tensor net_densenet(net_builder *b, ms_tensor x) {
    while (b->layers < b->wanted) {
        ms_tensor there[MS_LIMIT_IN];
        uint32_t count = 0;
        there[count++] = net_conv(b, x, 16);
        while (b->layers < b->wanted && count < 12) {
            ms_tensor all = count > 1 ? net_join(b, there, count, true) : there[0];
            there[count++] = net_conv(b, net_relu(b, net_norm(b, all)), 4);
        }
        x = net_join(b, there, count, true);
    }
    return x;
}

NETS_API ms_tensor net_unet(net_builder *b, ms_tensor x) {
    enum { LEVELS = 5 };
    const uint32_t units = b->wanted / (2 * LEVELS * 3) > 0 ? b->wanted / (2 * LEVELS * 3) : 1;
    ms_tensor skip[LEVELS];
    for (int level = 0; level < LEVELS; level++) {
        for (uint32_t i = 0; i < units; i++) {
            x = net_unit(b, x, 128 >> level);
        }
        skip[level] = x;
    }
    for (int level = LEVELS; level-- > 0;) {
        ms_tensor both[2];
        both[0] = net_conv(b, x, 128 >> level);
        both[1] = skip[level];
        x = net_join(b, both, 2, true);
        for (uint32_t i = 0; i < units; i++) {
            x = net_unit(b, x, 128 >> level);
        }
    }
    return x;
}

NETS_API ms_tensor net_inception(net_builder *b, ms_tensor x) {
    for (int64_t size = 16; b->layers < b->wanted;) {
        ms_tensor branch[4];
        for (uint32_t k = 0; k < 4; k++) {
            branch[k] = x;
            for (uint32_t i = 0; i <= k % 3; i++) {
                branch[k] = net_unit(b, branch[k], size / 4);
            }
        }
        x = net_join(b, branch, 4, true);
        size = 8 + (int64_t)(16 * (b->wanted - (b->layers < b->wanted ? b->layers : b->wanted)) /
                             b->wanted / 4 * 4);
    }
    return x;
}

NETS_API ms_tensor net_resnet(net_builder *b, ms_tensor x) {
    x = net_conv(b, x, 64);
    while (b->layers < b->wanted) {
        ms_tensor two[2];
        two[0] = x;
        two[1] = net_norm(b, net_conv(b, net_unit(b, x, 64), 64));
        x = net_relu(b, net_join(b, two, 2, false));
    }
    return x;
}

NETS_API ms_tensor net_random(net_builder *b, ms_tensor x) {
    static const int64_t sizes[] = {1, 2, 2, 3, 5, 8, 13, 40};
    static ms_tensor value[NET_OPEN];
    static bool is_read[NET_OPEN];
    ms_tensor unread[MS_LIMIT_IN];
    uint32_t count = 0, open = 0;
    memset(is_read, 0, sizeof is_read);
    value[count++] = net_conv(b, x, sizes[net_below(b, 8)]);
    while (b->layers < b->wanted && count < NET_OPEN) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        const uint32_t in = 1 + net_below(b, 3);
        for (uint32_t k = 0; k < in; k++) {
            const uint32_t recent = count > 2 && net_below(b, 5) < 3 ? 2 : count;
            const uint32_t from = count - 1 - net_below(b, recent);
            d.in[k] = value[from];
            is_read[from] = true;
        }
        d.out[0] = net_value(b, sizes[net_below(b, 8)]);
        d.backward_reads.in = (uint16_t)net_below(b, 1u << in);
        d.backward_reads.out = (uint16_t)net_below(b, 2);
        d.backward_reads.nothing = !d.backward_reads.in && !d.backward_reads.out;
        value[count++] = net_layer(b, &d, 0.1 * (double)(1 + net_below(b, 100)));
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!is_read[i] && open < MS_LIMIT_IN) {
            unread[open++] = value[i];
        }
    }
    return open > 1 ? net_join(b, unread, open, false) : unread[0];
}

NETS_API ms_tensor net_chain(net_builder *b, ms_tensor x) {
    x = net_conv(b, x, 1 + net_below(b, 16));
    while (b->layers < b->wanted) {
        ms_layer_desc d;
        memset(&d, 0, sizeof d);
        d.in[0] = x;
        d.out[0] = net_value(b, 1 + net_below(b, 16));
        if (net_below(b, 3) == 0) {
            d.saved[0] =
                ms_saved(b->model, "saved", MS_DTYPE_F32, ms_shape2(1 + net_below(b, 8), 1024));
        }
        d.backward_reads.in = 1;
        d.backward_reads.saved = d.saved[0].id ? 1 : 0;
        d.backward_reads.out = (uint16_t)net_below(b, 2);
        x = net_layer(b, &d, 0.1 * (double)(1 + net_below(b, 100)));
    }
    return x;
}

NETS_API ms_tensor net_equal(net_builder *b, ms_tensor x) {
    while (b->layers < b->wanted) {
        x = net_conv(b, x, 64);
    }
    return x;
}

/* Registers a net of about so many layers in a model without layers. */
NETS_API void net_register(ms_model *model, net_kind kind, uint32_t layers, uint64_t seed) {
    static ms_tensor (*const make[NET_KIND_COUNT])(net_builder *, ms_tensor) = {
        net_densenet, net_unet, net_inception, net_resnet, net_random, net_chain, net_equal};
    net_builder b;
    memset(&b, 0, sizeof b);
    b.model = model;
    b.random = seed * 2654435761u + 1;
    b.wanted = layers;
    ms_tensor x = ms_input(model, "images", MS_DTYPE_F32, ms_shape2(4, 1024));
    x = make[kind](&b, x);
    ms_layer_desc d;
    memset(&d, 0, sizeof d);
    d.name = "loss";
    d.in[0] = x;
    d.out[0] = ms_activation(model, "loss", MS_DTYPE_F32, ms_shape1(16));
    d.forward = d.backward = net_nothing;
    d.no_recompute = true;
    ms_register_layer(model, &d);
    ms_set_loss(model, d.out[0]);
}

#endif // MEMSCALE_BENCH_NETS_H
