"""Train a GPT on sequences that lie on several GPUs: each holds two chunks of every sequence.

    torchrun --nproc-per-node 2 examples/train_long.py --model 1.3B --seqlen 131072 --steps 10
    python examples/train_long.py --model small --seqlen 32768 --steps 30   one GPU, same text and weights

Text, places and losses are cut by `shard`; attention is `context_parallel_attention`, in a process group of
its own, so that its messages do not wait behind FSDP's. Everything else of a layer works token by token and
needs nothing. Parameters are sharded by FSDP2, layers recomputed in the backward pass.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from train_gpt import CONFIGS, GPT, WARM_UP, standard_library

import hopper_attention
from hopper_attention.integrations.context_parallel import shard


class LongGPT(GPT):
    """A GPT that is told its tokens' places, and recomputes its layers in the backward pass."""

    def forward(self, text: torch.Tensor, following: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        scores = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


def train(name: str, seqlen: int, steps: int, rank: int, ranks: int, seed: int = 0) -> dict[str, object]:
    """Losses, and seconds of the median step after WARM_UP."""
    config = CONFIGS[name]
    group = dist.new_group(list(range(ranks)))
    attention = lambda q, k, v: hopper_attention.context_parallel_attention(q, k, v, group)
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = LongGPT(config, seqlen, attention).bfloat16()
    parameters = sum(x.numel() for x in model.parameters())
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text, generator = standard_library().cuda(), torch.Generator().manual_seed(seed)
    mine = lambda x: shard(x, rank, ranks, dim=-1)
    places = mine(torch.arange(seqlen, device="cuda"))
    losses, seconds = [], []
    for _ in range(steps):
        start = int(torch.randint(len(text) - seqlen - 1, (1,), generator=generator))
        taken = text[start : start + seqlen + 1].long()[None]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(mine(taken[:, :-1]), mine(taken[:, 1:]), places)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)  # of as many tokens on every rank
        losses.append(mean.item())
        seconds.append(time.perf_counter() - begin)
    taken_s = statistics.median(seconds[min(WARM_UP, steps // 2) :])
    flops = 6 * seqlen * parameters + 12 * config.layers * config.hidden * seqlen**2
    found = {"tokens_per_s": seqlen / taken_s, "tflops_per_gpu": flops / taken_s / 1e12 / ranks}
    memory = torch.cuda.max_memory_allocated() / 2**30
    return found | {"s": taken_s, "gib": memory, "losses": losses}


def report(args: argparse.Namespace, found: dict[str, object], rank: int, ranks: int) -> None:
    if rank == 0:
        print(
            f"{args.model}, seqlen {args.seqlen} on {ranks} GPUs: {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['tflops_per_gpu']:.0f} TFLOP/s a GPU, {found['gib']:.0f} GiB, "
            f"last loss {found['losses'][-1]:.4f}",
            flush=True,
        )
        if args.save:
            rows = json.loads(args.save.read_text()) if args.save.exists() else []
            rows.append({"model": args.model, "seqlen": args.seqlen, "gpus": ranks} | found)
            args.save.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=1, help="more than one show by how much runs differ")
    parser.add_argument("--save", type=Path, help="add what was measured to a JSON file")
    args = parser.parse_args()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}.items():
        os.environ.setdefault(name, str(value))  # without torchrun one process
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for _ in range(args.runs):
        report(args, train(args.model, args.seqlen, args.steps, rank, ranks), rank, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
