"""Generate with a Llama-shaped model whose keys and values lie in pages, a CUDA graph a step.

    python examples/decode.py                              a batch of 16 prompts of 2048 tokens, 128 new ones
    python examples/decode.py --batch 64 --prompt 8192 --attention hopper_attention sdpa

Weights are random: what is measured is the step. `hopper_attention` stores the new key and value and attends
to all of them in one launch, whatever their lengths; the graph is captured once, since lengths and page table
stay on the GPU. `sdpa` is PyTorch's own call on a cache that is cut to the longest sequence, without a graph,
as its shapes grow.
"""

import argparse
import time
from dataclasses import dataclass

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
    """Pages of keys and values for every layer, which sequences take as they grow; here all at once."""

    def __init__(self, config: Config, batch: int, longest: int, device: str):
        pages = -(-longest // PAGE)
        shape = config.layers, 2, batch * pages, PAGE, config.kv_heads, config.head_dim
        self.pages = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.table = torch.randperm(batch * pages, device=device).int().view(batch, pages)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def dense(self, layer: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, heads, longest, head_dim): what a call without pages needs."""
        used = self.table[:, : -(-longest // PAGE)]
        k, v = (x[used].flatten(1, 2)[:, :longest].transpose(1, 2) for x in self.pages[layer])
        return k, v

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        at = self.lengths.long()
        page = self.table.gather(1, (at // PAGE)[:, None])[:, 0]
        for x, cache in zip((k, v), self.pages[layer]):
            cache[page, at % PAGE] = x[:, 0]


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

    def forward(self, x: torch.Tensor, cache: Cache, attention: str, longest: int) -> torch.Tensor:
        c = self.config
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], -2)
        q, k = rotated(q, cache.lengths), rotated(k, cache.lengths)
        if attention == "hopper_attention":
            k_cache, v_cache = cache.pages[self.index]
            lengths = cache.lengths
            o = flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=cache.table
            )
        else:
            cache.store(self.index, k, v)
            keys, values = cache.dense(self.index, longest)
            seen = torch.arange(longest, device=x.device) <= cache.lengths[:, None]
            mask = seen[:, None, None]
            o = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)
        x = x + self.out(o.flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def step(self, tokens: torch.Tensor, cache: Cache, attention: str, longest: int = 0) -> None:
        """The next token of each sequence, in place; each sequence is one longer."""
        x = self.embedding(tokens)[:, None]
        for layer in self.layers:
            x = layer(x, cache, attention, longest)
        tokens.copy_(self.head(x[:, 0]).argmax(-1))
        cache.lengths += 1


@torch.no_grad()
def generate(model: Model, config: Config, attention: str, batch: int, prompt: int, new: int) -> float:
    """Seconds of a step."""
    torch.manual_seed(0)
    cache = Cache(config, batch, prompt + new + 8, "cuda")
    cache.pages.normal_(std=0.5)  # a prompt's keys and values, as if it had been read
    tokens = torch.randint(config.vocabulary, (batch,), device="cuda")
    ragged = torch.randint(prompt // 2, prompt + 1, (batch,), device="cuda")
    cache.lengths.copy_(ragged)
    step = lambda i: model.step(tokens, cache, attention, prompt + i + 1)
    for i in range(3):
        step(i)
    if attention == "hopper_attention":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(0)
        step = lambda i: graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(new):
        step(3 + i)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", default=["hopper_attention", "sdpa"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    config = Config()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Model(config)
    for attention in args.attention:
        seconds = generate(model, config, attention, args.batch, args.prompt, args.new)
        print(f"{attention:20} {1e6 * seconds:9.1f} µs a step  {args.batch / seconds:9.0f} tokens/s")


if __name__ == "__main__":
    main()
