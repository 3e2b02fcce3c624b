"""Train a GPT on the source text of Python's standard library, with one attention or another.

    python examples/train_gpt.py --model small --attention hopper_attention sdpa
    python examples/train_gpt.py --model 1.3B --seqlen 8192 --compile

The models are GPT-2-like: "small" (6 layers, hidden 512, 8 heads), and the two of FlashAttention-2's Table 1.
TFLOP/s are by that paper's formula, 6·tokens·parameters + 12·layers·hidden·seqlen² for each sequence, without
a discount for the causal mask.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hopper_attention

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


def flash_attention_4(q, k, v):
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def flash_attention_3(q, k, v):
    from flash_attn_interface import flash_attn_func

    found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


ATTENTION: dict[str, Attention] = {
    "hopper_attention": ours,
    "sdpa": plain,
    "cudnn": of_backend(SDPBackend.CUDNN_ATTENTION),
    "fa2": of_backend(SDPBackend.FLASH_ATTENTION),
    "fa3": flash_attention_3,
    "fa4": flash_attention_4,
}


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
        return F.cross_entropy(
            (self.norm(x) @ self.tokens.weight.T).flatten(0, 1).float(), following.flatten()
        )


# ---- training ---------------------------------------------------------------------------------------------


def standard_library() -> torch.Tensor:
    """The bytes of every module of Python's standard library, one after another."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def train(
    name: str, seqlen: int, attention: Attention, steps: int, compiled: bool = False, seed: int = 0
) -> dict[str, object]:
    """Tokens a second and TFLOP/s, the median of the steps after the first five, and every step's loss."""
    config = CONFIGS[name]
    torch.manual_seed(seed)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = GPT(config, seqlen, attention).bfloat16()
    parameters = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = torch.compile(model) if compiled else model
    text, generator = standard_library().cuda(), torch.Generator().manual_seed(1)
    batch = max(1, config.tokens // seqlen)
    losses, times = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - seqlen - 1, (batch, 1), generator=generator).cuda()
        taken = text[starts + torch.arange(seqlen + 1, device="cuda")].long()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(taken[:, :-1], taken[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    seconds = sorted(times[5:])[len(times[5:]) // 2]
    flops = 6 * batch * seqlen * parameters + 12 * config.layers * config.hidden * seqlen**2 * batch
    return {
        "tokens_per_s": batch * seqlen / seconds,
        "tflops": flops / seconds / 1e12,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=["hopper_attention", "sdpa"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", type=Path, help="add what was measured to a JSON file")
    args = parser.parse_args()
    if args.steps < 6:
        parser.error("--steps must be 6 or more: the first five are not timed")
    for name in args.attention:
        torch._dynamo.reset()
        try:
            found = train(args.model, args.seqlen, ATTENTION[name], args.steps, args.compile)
        except ImportError as error:
            print(f"{name:18} not installed: {error.name}")
            continue
        how = "compiled" if args.compile else "eager"
        print(
            f"{name:18} {args.model}, seqlen {args.seqlen}, {how}: {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['tflops']:.0f} TFLOP/s, {found['peak_gb']:.1f} GB, last loss {found['losses'][-1]:.4f}",
            flush=True,
        )
        if args.save:
            rows = json.loads(args.save.read_text()) if args.save.exists() else []
            what = {"model": args.model, "seqlen": args.seqlen, "how": how, "attention": name}
            args.save.write_text(json.dumps([*rows, what | found], indent=1) + "\n")


if __name__ == "__main__":
    main()
