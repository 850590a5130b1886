#!/usr/bin/env python3
"""Losses, logits and gradients of small models in transformers, in float64: writes models.h.

    python3 tests/reference/models.py > tests/reference/models.h

The values were made with Python 3.11.2, torch 2.15.0 and transformers 5.24.0, on a CPU, with the
attention that is written out ("eager").

Everything is computed in float64, from weights that float32 holds. transformers computes parts in
float32 whatever the model's type is: rotary frequencies and angles, RMS norms, softmax. InFloat64
turns each float32 that is asked for into float64, and stops if a float32 comes about all the same.

Weights are base + scale * unit(key, i), where key is the hash of the param's name in nn.h or
nn_models.h; tokens and targets follow from the same function, which tests/test_models.c has too.
What is minimised is the sum of the losses over the number of all rows; those of ignored targets
count as 0, which is what ms_set_loss has of nn_cross_entropy.
"""

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import (BertConfig, BertForMaskedLM, Gemma2Config, Gemma2ForCausalLM,
                          Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

BATCH, SEQUENCE, VOCABULARY, ELEMENTS, LOGITS = 2, 19, 61, 4, 16
ROWS = BATCH * SEQUENCE

# ---- the formulas ------------------------------------------------------------------------------

MASK = (1 << 64) - 1


def key_of(name):
    """FNV-1a, 64 bits."""
    key = 0xcbf29ce484222325
    for byte in name.encode():
        key = (key ^ byte) * 0x100000001b3 & MASK
    return key


def mix(x):
    """nn_mix: the finalizer of splitmix64, over an array of uint64."""
    x = x + np.uint64(0x9e3779b97f4a7c15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
    return x ^ (x >> np.uint64(31))


def bits(key, count):
    return mix(np.uint64(key) ^ mix(np.arange(count, dtype=np.uint64)))


def unit(key, count):
    """In [-1, 1), of 24 bits, so that float32 has each value."""
    return (bits(key, count) >> np.uint64(40)).astype(np.int64) / 2.0**23 - 1.0


def below(name, limit, count=ROWS):
    return (bits(key_of(name), count) % np.uint64(limit)).astype(np.int64).reshape(BATCH, -1)


# ---- float64 throughout ------------------------------------------------------------------------


class InFloat64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 else x
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        result = function(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})
        if isinstance(result, torch.Tensor) and result.dtype in (torch.float32, torch.bfloat16):
            raise RuntimeError(f"{function} gave {result.dtype}")
        return result


# ---- names: of ours, what it is in transformers ------------------------------------------------


class Param:
    """A param of ours: rows of one or several tensors of transformers."""

    def __init__(self, name, *parts, rows=None, transposed=False, base=None):
        self.name, self.parts, self.rows, self.transposed = name, parts, rows, transposed
        self.base = base

    def read(self, tensors):
        found = [tensors[part] for part in self.parts]
        if self.rows is not None:
            found = [tensor[self.rows] for tensor in found]
        return torch.cat([tensor.T if self.transposed else tensor for tensor in found])

    def write(self, tensors, values):
        begin = 0
        for part in self.parts:
            tensor = tensors[part] if self.rows is None else tensors[part][self.rows]
            tensor = tensor.T if self.transposed else tensor
            tensor.copy_(values[begin:begin + tensor.shape[0]])
            begin += tensor.shape[0]


def pair(name, part, transposed=False, base=None):
    return [Param(f"{name}.weight", f"{part}.weight", transposed=transposed, base=base),
            Param(f"{name}.bias", f"{part}.bias")]


def names_of_gpt2(config):
    params = [Param("wte", "transformer.wte.weight"), Param("wpe", "transformer.wpe.weight")]
    for i in range(config.n_layer):
        part = f"transformer.h.{i}"
        params += pair(f"h{i}.ln1", f"{part}.ln_1") + pair(f"h{i}.qkv", f"{part}.attn.c_attn", True)
        params += pair(f"h{i}.proj", f"{part}.attn.c_proj", True)
        params += pair(f"h{i}.ln2", f"{part}.ln_2") + pair(f"h{i}.fc", f"{part}.mlp.c_fc", True)
        params += pair(f"h{i}.fcproj", f"{part}.mlp.c_proj", True)
    return params + pair("lnf", "transformer.ln_f")


def names_of_bert(config):
    tables = "bert.embeddings"
    params = [Param("wte", f"{tables}.word_embeddings.weight"),
              Param("wpe", f"{tables}.position_embeddings.weight"),
              Param("wse", f"{tables}.token_type_embeddings.weight")]
    params += pair("lne", f"{tables}.LayerNorm")
    for i in range(config.num_hidden_layers):
        part = f"bert.encoder.layer.{i}"
        for kind in ("weight", "bias"):
            params.append(Param(f"h{i}.qkv.{kind}", *(f"{part}.attention.self.{name}.{kind}"
                                                      for name in ("query", "key", "value"))))
        params += pair(f"h{i}.proj", f"{part}.attention.output.dense")
        params += pair(f"h{i}.ln1", f"{part}.attention.output.LayerNorm")
        params += pair(f"h{i}.fc", f"{part}.intermediate.dense")
        params += pair(f"h{i}.fcproj", f"{part}.output.dense")
        params += pair(f"h{i}.ln2", f"{part}.output.LayerNorm")
    params += pair("mlm.dense", "cls.predictions.transform.dense")
    params += pair("mlm.ln", "cls.predictions.transform.LayerNorm")
    return params + [Param("mlm.bias", "cls.predictions.bias", base=0.0)]


def names_of_block(config, ours, block):
    """Of h0 and model.layers.0; names that the model does not have are left out later."""
    attn, mlp, width = f"{block}.self_attn", f"{block}.mlp", config.intermediate_size
    gemma = config.model_type.startswith("gemma")
    base = 0.0 if gemma else 1.0
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    norm = lambda name, part: Param(f"{ours}.{name}.weight", f"{part}.weight", base=base)
    params = [norm("norm1", f"{block}.input_layernorm")]
    for kind in ("weight", "bias"):
        params.append(Param(f"{ours}.qkv.{kind}", *(f"{attn}.{x}_proj.{kind}" for x in "qkv")))
    params += [Param(f"{ours}.qkv.weight", f"{attn}.qkv_proj.weight"),
               norm("qnorm", f"{attn}.q_norm"), norm("knorm", f"{attn}.k_norm"),
               Param(f"{ours}.proj.weight", f"{attn}.o_proj.weight")]
    params += [norm("post1", f"{block}.{after[0]}")] if gemma else []
    params += [norm("norm2", f"{block}.{before}"),
               Param(f"{ours}.gate.weight", f"{mlp}.gate_proj.weight"),
               Param(f"{ours}.gate.weight", f"{mlp}.gate_up_proj.weight", rows=slice(0, width)),
               Param(f"{ours}.up.weight", f"{mlp}.up_proj.weight"),
               Param(f"{ours}.up.weight", f"{mlp}.gate_up_proj.weight", rows=slice(width, None)),
               Param(f"{ours}.down.weight", f"{mlp}.down_proj.weight")]
    return params + ([norm("post2", f"{block}.{after[1]}")] if gemma else [])


def names_of_llama(config):
    base = 0.0 if config.model_type.startswith("gemma") else 1.0
    params = [Param("tokens.weight", "model.embed_tokens.weight")]
    for i in range(config.num_hidden_layers):
        params += names_of_block(config, f"h{i}", f"model.layers.{i}")
    params.append(Param("norm.weight", "model.norm.weight", base=base))
    return params + [Param("head.weight", "lm_head.weight")]


NAMES = {"gpt2": names_of_gpt2, "bert": names_of_bert}  # of all others: names_of_llama

# ---- the models --------------------------------------------------------------------------------

ALL = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
       "attn_implementation": "eager"}
SIZES = {**ALL, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "tie_word_embeddings": False, "rms_norm_eps": 0.004}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 48}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


def rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


def models():
    """Of each: its name, model and the assignments to its config in C."""
    yield "gpt2", GPT2LMHeadModel, GPT2Config(
        **ALL, n_positions=24, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0)
    yield "bert", BertForMaskedLM, BertConfig(
        **{**SIZES, "max_position_embeddings": 24, "intermediate_size": 128,
           "tie_word_embeddings": True}, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    yield "llama3", LlamaForCausalLM, LlamaConfig(
        **{**SIZES, "hidden_size": 48}, rope_parameters=LLAMA3)
    yield "llama_linear", LlamaForCausalLM, LlamaConfig(
        **{**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 4,
           "rms_norm_eps": 1e-5}, rope_parameters=LINEAR)
    yield "mistral", MistralForCausalLM, MistralConfig(
        **SIZES, sliding_window=7, rope_parameters=rope(10000.0))
    yield "qwen2", Qwen2ForCausalLM, Qwen2Config(
        **{**SIZES, "tie_word_embeddings": True},
        rope_parameters=rope(1000000.0))
    yield "qwen3", Qwen3ForCausalLM, Qwen3Config(
        **SIZES, head_dim=12, rope_parameters=rope(1000000.0))
    yield "gemma2", Gemma2ForCausalLM, Gemma2Config(
        **{**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": True},
        head_dim=12, query_pre_attn_scalar=20, sliding_window=7, attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0, rope_parameters=rope(10000.0))
    yield "gemma3", Gemma3ForCausalLM, Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 7, "tie_word_embeddings": True},
        head_dim=12, query_pre_attn_scalar=20, sliding_window=7, rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": rope(10000.0)})
    yield "phi3", Phi3ForCausalLM, Phi3Config(**SIZES, rope_parameters=rope(10000.0))
    yield "phi4", Phi3ForCausalLM, Phi3Config(
        **{**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1},
        rope_parameters={**rope(10000.0), "partial_rotary_factor": 0.75})


def check_rotary(model, config):
    """That llama3's three cases occur: kept, scaled down, and in between."""
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "llama3":
        return
    p, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    plain = p["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    share = model.model.rotary_emb.inv_freq / plain
    assert (share == 1.0).any() and (abs(share * p["factor"] - 1.0) < 1e-12).any()
    assert ((share < 0.99) & (share * p["factor"] > 1.01)).any(), share


def assignments(config, tied):
    """The fields of nn_llama_config that differ from 0, of a model of transformers."""
    gemma, kind = config.model_type.startswith("gemma"), config.model_type
    ropes = config.rope_parameters
    full = ropes.get("full_attention", ropes)
    usual = config.hidden_size // config.num_attention_heads
    size = getattr(config, "head_dim", None) or usual
    share = full.get("partial_rotary_factor", 1.0)
    types = getattr(config, "layer_types", None) or []
    fields = [("vocabulary", VOCABULARY), ("layers", config.num_hidden_layers),
              ("channels", config.hidden_size), ("feed_forward", config.intermediate_size),
              ("heads", config.num_attention_heads), ("kv_heads", config.num_key_value_heads),
              ("head_size", size if size != usual else 0),
              ("turned", int(size * share) if share != 1.0 else 0), ("tied", tied),
              ("qkv_bias", kind == "qwen2"),
              ("qk_norm", kind in ("qwen3", "gemma3_text")), ("post_norms", gemma),
              ("offset_norms", gemma), ("scaled_tokens", gemma), ("gelu", gemma),
              ("epsilon", config.rms_norm_eps), ("theta", full["rope_theta"]),
              ("local_theta", ropes.get("sliding_attention", {}).get("rope_theta")),
              ("window", getattr(config, "sliding_window", None) if kind != "qwen2" else None),
              ("full_every", types.index("full_attention") + 1 if gemma else 0),
              ("attention_cap", getattr(config, "attn_logit_softcapping", None)),
              ("logit_cap", getattr(config, "final_logit_softcapping", None)),
              ("query_scale", float(config.query_pre_attn_scalar) if gemma else None)]
    if full["rope_type"] != "default":
        fields += [("scaling.kind", f"NN_ROTARY_{full['rope_type'].upper()}"),
                   ("scaling.factor", full["factor"]), ("scaling.low", full.get("low_freq_factor")),
                   ("scaling.high", full.get("high_freq_factor")),
                   ("scaling.original", full.get("original_max_position_embeddings"))]
    return fields


def assignments_of_transformer(config):
    return [("vocabulary", VOCABULARY), ("context", config.max_position_embeddings),
            ("layers", config.num_hidden_layers), ("heads", config.num_attention_heads),
            ("channels", config.hidden_size)]


# ---- what is recorded --------------------------------------------------------------------------


def scale_of(param, values):
    """Tables, and what decides which key a query sees, are larger; all are powers of two."""
    if values.dim() == 1:
        base = param.base if param.base is not None else 1.0 if "weight" in param.name else 0.0
        return base, 0.125
    is_large = ".qkv." in param.name or not param.name.startswith("h") or param.name[0:4] == "head"
    return 0.0, 0.5 if is_large else 0.25


@torch.no_grad()
def fill(params, tensors):
    for param in params:
        shape = param.read(tensors)
        param.offset, param.scale = scale_of(param, shape)
        values = param.offset + param.scale * unit(key_of(param.name), shape.numel())
        values = values.astype(np.float32).astype(np.float64).reshape(shape.shape)
        param.write(tensors, torch.from_numpy(values))


def loss_of(model, kind):
    """Sum of the losses, rows that count, and logits."""
    inputs = {"token_type_ids": torch.from_numpy(below("segments", 2))} if kind == "bert" else {}
    inputs.update({} if kind == "bert" else {"use_cache": False})
    logits = model(input_ids=torch.from_numpy(below("tokens", VOCABULARY)), **inputs).logits
    targets = torch.from_numpy(below("targets", VOCABULARY))
    targets[torch.from_numpy(below("ignored", 5)) == 0] = -100
    flat = torch.nn.functional.cross_entropy(
        logits.view(ROWS, VOCABULARY), targets.view(ROWS), ignore_index=-100, reduction="sum")
    return flat, int((targets >= 0).sum()), logits


def row_of(param, gradient):
    g = gradient.detach().numpy().ravel()
    projection = float((g * unit(~key_of(param.name) & MASK, g.size)).sum())
    numbers = [float(np.sqrt((g * g).sum())), projection]
    elements = [float(g[k * (g.size - 1) // (ELEMENTS - 1)]) for k in range(ELEMENTS)]
    name = f'"{param.name}",'
    text = ", ".join(f"{x:.10g}" for x in numbers) + ", {" + ", ".join(
        f"{x:.10g}" for x in elements) + "}"
    return f"    {{{name} {c_float(param.offset)}, {c_float(param.scale)}, {g.size}, {text}}},"


def c_float(value):
    text = f"{value:.9g}"
    return text + ("f" if "." in text or "e" in text else ".0f")


def c_value(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return c_float(value) if isinstance(value, float) else str(value)


def record(name, kind, config):
    with InFloat64():
        torch.set_default_dtype(torch.float64)
        model = kind(config).eval()
        check_rotary(model, config)
        tensors = dict(model.named_parameters())
        names = NAMES.get(config.model_type, names_of_llama)
        params = [p for p in names(config) if all(part in tensors for part in p.parts)]
        covered = {part for param in params for part in param.parts}
        assert covered == set(tensors), covered ^ set(tensors)
        fill(params, tensors)
        total, counted, logits = loss_of(model, config.model_type)
        (total / ROWS).backward()
        gradients = {part: tensor.grad for part, tensor in tensors.items()}
    rows = [row_of(param, param.read(gradients)) for param in params]
    fields = (assignments_of_transformer(config) if config.model_type in NAMES else
              assignments(config, "lm_head.weight" not in tensors))
    flat = logits.detach().numpy().ravel()
    spread = [float(flat[k * (flat.size - 1) // (LOGITS - 1)]) for k in range(LOGITS)]
    return write(name, config.model_type, fields, rows, total.item(), counted, spread, flat)


def write(name, kind, fields, rows, total, counted, spread, flat):
    """Prints the settings and params of a model; returns its row of the table."""
    struct = "nn_transformer_config" if kind in NAMES else "nn_llama_config"
    print(f"\nstatic void r_set_{name}({struct} *c) {{")
    for field, value in fields:
        if value:
            print(f"    c->{field} = {c_value(value)};")
    print(f"    c->batch = {BATCH};\n    c->sequence = {SEQUENCE};\n}}")
    print(f"\nstatic const r_param r_params_of_{name}[] = {{")
    print("\n".join(rows))
    print("};")
    setters = f"r_set_{name}, NULL" if kind in NAMES else f"NULL, r_set_{name}"
    return (f'    {{"{name}", {c_value(kind == "bert")}, {setters}, '
            f"r_params_of_{name}, (int)(sizeof r_params_of_{name} / sizeof(r_param)), "
            f"{total:.12g}, {counted}, {np.sqrt((flat * flat).sum()):.12g}, "
            f"{{{', '.join(f'{x:.10g}' for x in spread)}}}}},")


HEAD = f"""/*  models.h - losses, logits and gradients of small models, as transformers computes them in
    float64: written by models.py, which says how and with which versions. After nn.h. */
#ifndef REFERENCE_MODELS_H
#define REFERENCE_MODELS_H

// clang-format off

enum {{ R_BATCH = {BATCH}, R_SEQUENCE = {SEQUENCE}, R_VOCABULARY = {VOCABULARY} }};
enum {{ R_ELEMENTS = {ELEMENTS}, R_LOGITS = {LOGITS} }};

/* A param, whose values are base + scale * unit(key of the name, i); of its gradient the norm, the
   sum of the elements times unit(inverted key, i), and elements spread evenly from the first to the
   last. */
typedef struct r_param {{
    const char *name;
    float base, scale;
    int count;
    double norm, projection, elements[R_ELEMENTS];
}} r_param;

/* The losses are added up over all rows, of which `counted` are not ignored. */
typedef struct r_model {{
    const char *name;
    bool is_bert;
    void (*set_transformer)(nn_transformer_config *); // or
    void (*set_llama)(nn_llama_config *);
    const r_param *params;
    int param_count;
    double losses;
    int counted;
    double logits_norm, logits[R_LOGITS]; // those spread evenly, too
}} r_model;"""


def main():
    print(HEAD)
    table = [record(*model) for model in models()]
    print("\nstatic const r_model r_models[] = {")
    print("\n".join(table))
    print("};\n\n// clang-format on\n\n#endif // REFERENCE_MODELS_H")


main()
