"""Generate with a Llama-shaped model whose keys and values lie in pages, a CUDA graph a step.

    python examples/decode.py                              a batch of 16 prompts of 2048 tokens, 128 new ones
    python examples/decode.py --batch 64 --prompt 8192 --attention hopper_attention sdpa
    python -m examples.decode --attention hopper_attention sdpa fa3

Weights are random: what is measured is the step. Each way of attention is captured once, since lengths and
page table stay on the GPU:
    hopper_attention  stores the new key and value and attends to all of them in one launch, whatever their
                      lengths
    sdpa              PyTorch's own call on a cache without pages, as long as the longest sequence can become,
                      with a mask; the new key and value are stored before
    fa3               FlashAttention-3's call, which stores too, on the same pages; where it is installed
"""

import argparse
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hopper_attention import flash_attn_with_kvcache

PAGE = 64


@dataclass(frozen=True)
class Config:
    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 8192
    vocabulary: int = 128256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Cache:
    """Keys and values of every layer: in pages that sequences take as they grow, here all at once; or, not
    `paged`, each sequence's in a row. A sequence can become `longest` tokens long."""

    def __init__(self, config: Config, batch: int, longest: int, device: str, paged: bool = True):
        pages = -(-longest // PAGE)
        places = (batch * pages, PAGE) if paged else (batch, pages * PAGE)
        shape = config.layers, 2, *places, config.kv_heads, config.head_dim
        self.kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.batch, self.at = torch.arange(batch, device=device), torch.arange(pages * PAGE, device=device)


def by_hopper_attention(cache: Cache, layer: int, q, k, v) -> torch.Tensor:
    caches, lengths = cache.kv[layer], cache.lengths
    return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=cache.table)


def by_sdpa(cache: Cache, layer: int, q, k, v) -> torch.Tensor:
    for x, stored in zip((k, v), cache.kv[layer]):
        stored[cache.batch, cache.lengths.long()] = x[:, 0]
    seen = (cache.at <= cache.lengths[:, None])[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, *cache.kv[layer]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def by_fa3(cache: Cache, layer: int, q, k, v) -> torch.Tensor:
    from harness import fa3

    (caches, build), options = (cache.kv[layer], next(iter(fa3.builds().values()))), {"num_splits": 0}
    options |= {"window_size_left": -1, "window_size_right": -1, "k_new": k, "v_new": v}
    options |= {"seqused_k": cache.lengths, "page_table": cache.table}
    return fa3._call(build.fwd, q=q, k=caches[0], v=caches[1], **options)()[0]


ATTENTIONS = {"hopper_attention": by_hopper_attention, "sdpa": by_sdpa, "fa3": by_fa3}


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE of x (batch, 1, heads, head_dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 500000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = (f(angles)[:, None, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(nn.Module):
    def __init__(self, config: Config, index: int):
        super().__init__()
        self.config, self.index, d = config, index, config.hidden
        kv = config.kv_heads * config.head_dim
        self.qkv, self.out = nn.Linear(d, d + 2 * kv, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = (
            nn.Linear(d, 2 * config.feed_forward, bias=False),
            nn.Linear(config.feed_forward, d, bias=False),
        )
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2))

    def forward(self, x: torch.Tensor, cache: Cache, attention: str) -> torch.Tensor:
        c = self.config
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], -2)
        q, k = rotated(q, cache.lengths), rotated(k, cache.lengths)
        o = ATTENTIONS[attention](cache, self.index, q, k, v)
        x = x + self.out(o.flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def step(self, tokens: torch.Tensor, cache: Cache, attention: str) -> None:
        """The next token of each sequence, in place; each sequence is one longer."""
        x = self.embedding(tokens)[:, None]
        for layer in self.layers:
            x = layer(x, cache, attention)
        tokens.copy_(self.head(x[:, 0]).argmax(-1))
        cache.lengths += 1


@torch.no_grad()
def generate(model: Model, config: Config, attention: str, batch: int, prompt: int, new: int) -> float:
    """Seconds of a step."""
    torch.manual_seed(0)
    cache = Cache(config, batch, prompt + new + 8, "cuda", paged=attention != "sdpa")
    cache.kv.normal_(std=0.5)  # a prompt's keys and values, as if it had been read
    tokens = torch.randint(config.vocabulary, (batch,), device="cuda")
    ragged = torch.randint(prompt // 2, prompt + 1, (batch,), device="cuda")
    cache.lengths.copy_(ragged)
    step = functools.partial(model.step, tokens, cache, attention)
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(new):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention", nargs="+", choices=list(ATTENTIONS), default=["hopper_attention", "sdpa"]
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--save", type=Path, help="a file to add a line of JSON to for each way of attention")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("examples/decode.py: needs a CUDA GPU")
    config = Config()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Model(config)
    for attention in args.attention:
        seconds = generate(model, config, attention, args.batch, args.prompt, args.new)
        print(f"{attention:20} {1e6 * seconds:9.1f} µs a step  {args.batch / seconds:9.0f} tokens/s")
        if args.save:
            kept = {"attention": attention, "batch": args.batch, "prompt": args.prompt, "us": 1e6 * seconds}
            with args.save.open("a") as file:
                file.write(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
