"""Train a GPT on the source text of Python's standard library, with one attention or another.

    python examples/train_gpt.py --model small --attention hopper_attention sdpa
    python examples/train_gpt.py --model 1.3B --seqlen 8192 --compile

The models are GPT-2-like: "small" (6 layers, hidden 512, 8 heads), and the two of FlashAttention-2's Table 1.
TFLOP/s are by that paper's formula, 6·tokens·parameters + 12·layers·hidden·seqlen² for each sequence, without
a discount for the causal mask. The learning rate rises over the first steps: without, they are so unstable
that losses which should be alike are not.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopper_attention
from hopper_attention.cache import write_atomically

WARM_UP = 5  # steps that are not timed
RATE, RISING = 3e-4, 20  # the learning rate, and over how many steps it comes to that
COMPILE_OPTIONS = {"model": {}, "graphs": {"mode": "reduce-overhead"}}
Attention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # (batch, heads, seqlen, head_dim)


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    heads: int
    tokens: int  # of a step
    vocabulary: int = 256


CONFIGS = {
    "small": Config(6, 512, 8, 16 * 1024),
    "1.3B": Config(24, 2048, 16, 16 * 1024),
    "2.7B": Config(32, 2560, 20, 16 * 1024),
}


# ---- who computes attention -------------------------------------------------------------------------------


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_backend(backend: SDPBackend) -> Attention:
    def call(q, k, v):
        with sdpa_kernel(backend):
            return plain(q, k, v)

    return call


def ours(q, k, v):
    return hopper_attention.attention(q, k, v, causal=True)


ATTENTION: dict[str, Attention] = {
    "hopper_attention": ours,
    "sdpa": plain,
    "cudnn": of_backend(SDPBackend.CUDNN_ATTENTION),
    "fa2": of_backend(SDPBackend.FLASH_ATTENTION),
}
PEERS = "fa3", "fa4", "fp32"  # of this repository


def attention_of(name: str) -> Attention:
    if name in ATTENTION:
        return ATTENTION[name]
    from harness import trained_peers  # whoever copies the example has none

    return trained_peers.attention(name)


# ---- the model --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, config: Config, attention: Attention):
        super().__init__()
        self.heads, self.attention = config.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)
        self.up, self.down = (
            nn.Linear(config.hidden, 4 * config.hidden),
            nn.Linear(4 * config.hidden, config.hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Slices of the packed projection, (batch, heads, seqlen, head_dim) as views: nothing is copied.
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: Config, seqlen: int, attention: Attention):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.places = nn.Embedding(seqlen, config.hidden)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * config.layers) ** 0.5 if last else 1))

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


# ---- training ---------------------------------------------------------------------------------------------


def standard_library() -> torch.Tensor:
    """The bytes of every module of Python's standard library, one after another."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def compile_forward(modules: list[nn.Module], **options: object) -> None:
    """Have a class's modules computed by one compiled `forward`, of which no other module's has a part: what
    `torch.compile` keeps, it keeps by code object, and searches in every call."""
    plain = type(modules[0]).forward
    copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
    for module in modules:
        module.forward = torch.compile(MethodType(copy, module), **options)


class Run:
    """A model with its optimizer, trained with one attention; every run of a seed starts from the same
    weights."""

    def __init__(self, config: Config, seqlen: int, attention: Attention, compiled: str | None, seed: int):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            self.model = GPT(config, seqlen, attention).bfloat16()
        if compiled == "blocks":
            compile_forward(list(self.model.blocks))
        elif compiled:
            compile_forward([self.model], **COMPILE_OPTIONS[compiled])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, text: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (len(self.losses) + 1) / RISING)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = self.model(text[:, :-1], text[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def train(
    name: str, seqlen: int, attention: list[Attention], steps: int, compiled: str | None, seed: int = 0
) -> list[dict[str, object]]:
    """Tokens a second and TFLOP/s, of the median step after WARM_UP, and every loss, for each way to compute
    attention. They take turns, step by step, on the same text, in another order each time: at the power cap
    a step's clock depends on how much power the steps before it took."""
    config = CONFIGS[name]
    batch = max(1, config.tokens // seqlen)
    runs = [Run(config, seqlen, one, compiled, seed) for one in attention]
    text, generator = standard_library().cuda(), torch.Generator().manual_seed(seed)
    order = random.Random(seed)
    try:
        # Gradients in this thread: beside autograd's own both run Python 1.4 to 1.7 times as slowly.
        with torch.autograd.set_multithreading_enabled(False):
            for step in range(steps):
                if step == WARM_UP:  # or later collections look through all that compiling has left
                    gc.collect()
                    gc.freeze()
                starts = torch.randint(len(text) - seqlen - 1, (batch, 1), generator=generator).cuda()
                taken = text[starts + torch.arange(seqlen + 1, device="cuda")].long()
                for run in order.sample(runs, len(runs)):
                    run.step(taken)
    finally:
        gc.unfreeze()
    parameters = sum(x.numel() for x in runs[0].model.parameters())
    flops = 6 * batch * seqlen * parameters + 12 * config.layers * config.hidden * seqlen**2 * batch
    found = []
    for run in runs:
        seconds = statistics.median(run.seconds[WARM_UP:])
        rates = {"tokens_per_s": batch * seqlen / seconds, "tflops": flops / seconds / 1e12}
        found.append(rates | {"ms": 1e3 * seconds, "losses": run.losses})
    return found


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """As JSON, a row a line."""
    write_atomically(path, ("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n").encode())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text that is taken")
    parser.add_argument(
        "--attention", nargs="+", choices=[*ATTENTION, *PEERS], default=["hopper_attention", "sdpa"],
        help="take turns; one named twice shows by how much two of its own runs differ",
    )  # fmt: skip
    parser.add_argument(
        "--compile", choices=["blocks", *COMPILE_OPTIONS],
        help="by torch.compile: layer by layer, the whole model, or into CUDA graphs",
    )  # fmt: skip
    parser.add_argument("--save", type=Path, help="add what was measured to a JSON file")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("examples/train_gpt.py: needs a CUDA GPU")
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}: so many are not timed")
    torch._dynamo.config.recompile_limit = 64  # past it a model would run uncompiled
    how = f"{args.compile} compiled" if args.compile else "eager"
    calls = [attention_of(name) for name in args.attention]
    rows = json.loads(args.save.read_text()) if args.save and args.save.exists() else []
    trained = train(args.model, args.seqlen, calls, args.steps, args.compile, args.seed)
    for name, found in zip(args.attention, trained):
        print(
            f"{name:18} {args.model}, seqlen {args.seqlen}, {how}: {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['tflops']:.0f} TFLOP/s, last loss {found['losses'][-1]:.4f}",
            flush=True,
        )
        what = {"model": args.model, "seqlen": args.seqlen, "how": how, "seed": args.seed, "attention": name}
        where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        rows.append(what | where | found)
    if args.save:
        write_rows(args.save, rows)


if __name__ == "__main__":
    main()
