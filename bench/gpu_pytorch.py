#!/usr/bin/env python3
"""The workloads and steps of bench/gpu in plain PyTorch: peak memory and time per step.

    python3 bench/gpu_pytorch.py --tsv
    python3 bench/gpu_pytorch.py --part steps --markdown

The same models, shapes and tokens as nn.h builds, in float32 with TF32 matrix products, eager, AdamW
with its defaults; plain, and with torch.utils.checkpoint around each block. Attention is
F.scaled_dot_product_attention; with --math it is written out, which keeps the scores. The columns
are those of bench/gpu --tsv: peak_bytes is torch.cuda.max_memory_allocated, taken_bytes what the
device lacks after the steps (cudaMemGetInfo), which includes what the caching allocator holds.

--part steps is GPT-2 with sequences of 1,024 tokens, as bench/gpu --part steps: autocast to BF16, or TF32,
and AdamW fused; eager, compiled, and checkpointed.
"""

import argparse
import datetime
import math
import statistics
import subprocess
import sys
import time


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tsv", action="store_true", help="tab-separated output")
    parser.add_argument("--markdown", action="store_true", help="a table for bench/results")
    parser.add_argument("--part", choices=("workloads", "steps"), default="workloads",
                        help="the published workloads, or steps of GPT-2 with 1,024 tokens")
    parser.add_argument("--seconds", type=int, default=0, help="of the steps: then no row begins")
    parser.add_argument("--tiny", action="store_true", help="two tiny models")
    parser.add_argument("--model", default="all", help="one of the workloads or steps (all)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (5)")
    parser.add_argument("--math", action="store_true", help="attention written out")
    parser.add_argument("--fused", action="store_true", help="AdamW with fused=True")
    parser.add_argument("--commit", help="for the header; else git is asked")
    return parser.parse_args()


try:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    parse_options()  # --help needs no PyTorch
    sys.exit(f"gpu_pytorch.py: PyTorch is missing ({error}); see https://pytorch.org")

# name: layers, heads, channels, vocabulary, rows of the position table, batch, sequence
WORKLOADS = {
    "bert-base": (12, 12, 768, 30522, 512, 16, 128),
    "bert-large": (24, 16, 1024, 30522, 512, 16, 128),
    "gpt2-medium": (24, 16, 1024, 50257, 1024, 4, 512),
    "gpt2-large": (36, 20, 1280, 50257, 1024, 2, 512),
    "gpt2-xl": (48, 25, 1600, 50257, 1024, 1, 512),
}
TINY = {
    "gpt2-tiny": (4, 2, 32, 256, 64, 2, 12),
    "bert-tiny": (4, 2, 32, 256, 64, 2, 12),
}
STEPS = {
    "gpt2-124M": (12, 12, 768, 50257, 1024, 16, 1024),
    "gpt2-774M": (36, 20, 1280, 50257, 1024, 8, 1024),
}
PADDED = 50304
# model, vocabulary is padded, arithmetic, compiled, checkpointed; the most important come first
STEP_PLANS = (
    ("gpt2-124M", False, "bf16", False, False),
    ("gpt2-774M", False, "bf16", False, False),
    ("gpt2-124M", False, "bf16", True, False),
    ("gpt2-774M", False, "bf16", False, True),
    ("gpt2-124M", False, "bf16", False, True),
    ("gpt2-124M", False, "tf32", False, False),
    ("gpt2-774M", False, "tf32", False, False),
    ("gpt2-124M", True, "bf16", True, False),
    ("gpt2-124M", True, "bf16", False, False),
    ("gpt2-774M", False, "bf16", True, False),
    ("gpt2-124M", False, "bf16", True, True),
)
FP32_TOO = ("gpt2-medium", "gpt2-tiny")

COLUMNS = (
    "framework model plan arithmetic launch batch sequence params predicted_bytes peak_bytes "
    "wrap_bytes taken_bytes ms ms_min ms_max wall_ms enqueue_us instructions executor_percent "
    "recompute_share tflops loss_first loss_last same_bits"
).split()
STEP_COLUMNS = (
    "model arithmetic plan launch peak_bytes taken_bytes ms ms_min ms_max enqueue_us tokens/s tflops "
    "loss_last first_step_s"
).split()
SHORT = "framework model plan arithmetic peak_bytes taken_bytes ms wall_ms enqueue_us tflops".split()


class Attention(nn.Module):
    def __init__(self, channels, heads, causal, written_out):
        super().__init__()
        self.heads, self.causal, self.written_out = heads, causal, written_out
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x):
        batch, sequence, channels = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(channels, dim=2)
        )
        if self.written_out:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            if self.causal:
                ones = torch.ones(sequence, sequence, dtype=torch.bool, device=x.device)
                scores = scores.masked_fill(ones.triu(1), -math.inf)
            mixed = scores.softmax(dim=3) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(batch, sequence, channels))


class Block(nn.Module):
    """Normalization before each branch (GPT-2) or after each sum (BERT)."""

    def __init__(self, channels, heads, is_bert, written_out):
        super().__init__()
        epsilon = 1e-12 if is_bert else 1e-5
        self.is_bert = is_bert
        self.ln1 = nn.LayerNorm(channels, eps=epsilon)
        self.attention = Attention(channels, heads, not is_bert, written_out)
        self.ln2 = nn.LayerNorm(channels, eps=epsilon)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fcproj = nn.Linear(4 * channels, channels)

    def mlp(self, x):
        return self.fcproj(F.gelu(self.fc(x), approximate="none" if self.is_bert else "tanh"))

    def forward(self, x):
        if self.is_bert:
            x = self.ln1(x + self.attention(x))
            return self.ln2(x + self.mlp(x))
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Transformer(nn.Module):
    """GPT-2, or BERT with its masked-language-model head; the head is tied to the token table."""

    def __init__(self, size, is_bert, checkpointed, written_out):
        super().__init__()
        layers, heads, channels, vocabulary, context, _, sequence = size
        self.is_bert, self.checkpointed = is_bert, checkpointed
        self.wte = nn.Embedding(vocabulary, channels)
        self.wpe = nn.Embedding(context, channels)
        if is_bert:
            self.wse = nn.Embedding(2, channels)
            self.lne = nn.LayerNorm(channels, eps=1e-12)
            self.dense = nn.Linear(channels, channels)
            self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.blocks = nn.ModuleList(
            Block(channels, heads, is_bert, written_out) for _ in range(layers)
        )
        self.ln = nn.LayerNorm(channels, eps=1e-12 if is_bert else 1e-5)
        self.register_buffer("positions", torch.arange(sequence), persistent=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(self.positions)
        if self.is_bert:
            x = self.lne(x + self.wse(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.is_bert:
            x = F.gelu(self.dense(x))
        logits = F.linear(self.ln(x), self.wte.weight, self.bias if self.is_bert else None)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_batch(size, device):
    """The tokens of bench/models.h, each the target of the one before it."""
    _, _, _, vocabulary, _, batch, sequence = size
    ids, state = [], 1
    for _ in range(batch * sequence + 1):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append((state >> 8) % vocabulary)
    ids = torch.tensor(ids, device=device)
    return ids[:-1].view(batch, sequence), ids[1:].view(batch, sequence)


def make_step(model, batch, fused, compiled=False, half=False):
    """A function that trains one step and returns the loss, still on the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0,
                                  fused=True if fused else None)
    run = torch.compile(model) if compiled else model

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = run(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def step_flops(size, params):
    """As in bench/gpu.c: Chowdhery et al., "PaLM", 2022, appendix B."""
    layers, _, channels, _, _, batch, sequence = size
    return batch * sequence * (6 * params + 12 * layers * channels * sequence)


def time_steps(step, count):
    """Milliseconds of each step by events and on average by the clock, one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - start) / count
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])], wall


def time_enqueue(step, count):
    """Microseconds of the host for each step, with an idle GPU before it."""
    samples = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        samples.append(1e6 * (time.perf_counter() - start))
    return samples


def measure(size, is_bert, checkpointed, options, compiled=False, half=False):
    """A row of the table, as far as it is measured here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    before = torch.cuda.mem_get_info()[0]
    model = Transformer(size, is_bert, checkpointed, options.math).to("cuda")
    step = make_step(model, draw_batch(size, "cuda"), options.fused, compiled, half)
    start = time.perf_counter()
    first = step().item()
    first_step = time.perf_counter() - start
    for _ in range(options.warmup):
        step()
    samples, wall = time_steps(step, options.steps)
    enqueue = time_enqueue(step, options.steps)
    last = step().item()
    params = sum(p.numel() for p in model.parameters())
    ms = statistics.median(samples)
    return {
        "params": params,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "taken_bytes": before - torch.cuda.mem_get_info()[0],
        "ms": f"{ms:.3f}",
        "ms_min": f"{min(samples):.3f}",
        "ms_max": f"{max(samples):.3f}",
        "wall_ms": f"{wall:.3f}",
        "enqueue_us": f"{statistics.median(enqueue):.1f}",
        "tokens/s": f"{1e3 * size[5] * size[6] / ms:.0f}",
        "first_step_s": f"{first_step:.1f}",
        "tflops": f"{1e-9 * step_flops(size, params) / ms:.2f}",
        "loss_first": f"{first:.6f}",
        "loss_last": f"{last:.6f}",
    }


def make_row(name, size, checkpointed, tf32, options):
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    row = {
        "framework": "pytorch-math" if options.math else "pytorch",
        "model": name,
        "plan": "checkpointed" if checkpointed else "plain",
        "arithmetic": "tf32" if tf32 else "fp32",
        "launch": "eager",
        "batch": size[5],
        "sequence": size[6],
    }
    try:
        row.update(measure(size, name.startswith("bert"), checkpointed, options))
    except torch.cuda.OutOfMemoryError:
        pass  # the row says so by its dashes
    return row


def make_step_row(plan, options):
    """A row of the steps, and a note if it could not be measured."""
    name, padded, arithmetic, compiled, checkpointed = plan
    size = STEPS[name]
    if padded:
        size = size[:3] + (PADDED,) + size[4:]
    torch.set_float32_matmul_precision("high")
    row = {
        "model": f"{name}, {size[5]} x {size[6]}",
        "arithmetic": arithmetic,
        "plan": ("checkpointed" if checkpointed else "plain") + (", 50,304 words" if padded else ""),
        "launch": "compiled" if compiled else "eager",
    }
    note = None
    try:
        row.update(measure(size, False, checkpointed, options, compiled, arithmetic == "bf16"))
    except torch.cuda.OutOfMemoryError:
        note = "out of memory"
    except Exception as error:  # of the compiler, which may be missing: the other rows are measured
        note = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    if compiled:
        torch._dynamo.reset()
    return row, note


def print_steps(options):
    """The rows of STEP_PLANS for which there is time."""
    start, notes = time.monotonic(), []
    options.fused = True
    print_line(STEP_COLUMNS, options)
    if options.markdown:
        print("|---" * len(STEP_COLUMNS) + "|", flush=True)
    for plan in STEP_PLANS:
        if options.model not in ("all", plan[0]):
            continue
        title = ", ".join([plan[0], plan[2], "compiled" if plan[3] else "eager",
                           "checkpointed" if plan[4] else "plain"] + [str(PADDED)] * plan[1])
        if options.seconds and time.monotonic() - start > options.seconds:
            notes.append(f"- {title}: left out for want of time")
            continue
        row, note = make_step_row(plan, options)
        print_row(row, STEP_COLUMNS, options)
        if note:
            notes.append(f"- {title}: {note}")
    if notes:
        print("\n" + "\n".join(notes))


def print_line(cells, options):
    if options.markdown:
        print("| " + " | ".join(str(cell).replace("_", " ") for cell in cells) + " |", flush=True)
    elif options.tsv:
        print("\t".join(str(cell) for cell in cells), flush=True)
    else:
        print("".join(f"{cell!s:>15}" for cell in cells), flush=True)


def print_row(row, columns, options):
    def cell(column):
        value = row.get(column, "-")
        if not options.tsv and column.endswith("_bytes") and value != "-":
            return f"{value / 1e6:.1f} MB"
        return value

    print_line([cell(column) for column in columns], options)


def find_commit(given):
    if given:
        return given
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def find_driver():
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return output.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def print_header(options):
    gpu = torch.cuda.get_device_properties(0)
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    mark = "-" if options.markdown else "#"
    print(f"{mark} {date}, commit {find_commit(options.commit)}, PyTorch {torch.__version__}")
    print(f"{mark} {gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
          f"{gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.1f} GiB")
    print(f"{mark} driver {find_driver()}, CUDA {torch.version.cuda}, AdamW "
          f"{'fused' if options.fused or options.part == 'steps' else 'by default (foreach)'}")
    print(f"{mark} {options.steps} timed steps, {options.warmup} to warm up; medians")
    if options.markdown:
        print()


def main():
    options = parse_options()
    workloads = STEPS if options.part == "steps" else TINY if options.tiny else WORKLOADS
    if options.model != "all" and options.model not in workloads:
        sys.exit(f"gpu_pytorch.py: --model {options.model}: there are {', '.join(workloads)}")
    if options.steps < 1 or options.warmup < 1:
        sys.exit("gpu_pytorch.py: --steps and --warmup are at least 1")
    if not torch.cuda.is_available():
        sys.exit("gpu_pytorch.py: PyTorch sees no CUDA device here")
    print_header(options)
    measure(TINY["gpt2-tiny"], False, False, options)  # loads kernels, which count for no model
    if options.part == "steps":
        print_steps(options)
        return
    columns = COLUMNS if options.tsv else SHORT
    print_line(columns, options)
    for name, size in workloads.items():
        if options.model in ("all", name):
            for tf32 in (True, False) if name in FP32_TOO else (True,):
                for checkpointed in (False, True):
                    print_row(make_row(name, size, checkpointed, tf32, options), columns, options)


if __name__ == "__main__":
    main()
