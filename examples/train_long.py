"""Train a GPT on sequences that lie on several GPUs: each holds two chunks of every sequence.

    torchrun --nproc-per-node 2 examples/train_long.py --model 1.3B --seqlen 131072 --steps 10
    torchrun … --alone 1    and then each GPU by itself, on the same text and weights: do the losses agree?

Text, places and losses are cut by `shard`; attention is `context_parallel_attention`, in a process group of
its own, so that its messages do not wait behind FSDP's. Everything else of a layer works token by token and
needs nothing. Parameters are sharded by FSDP2. Layers are recomputed in the backward pass, all but attention,
which is most of the time here: its o and lse are kept.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from train_gpt import CONFIGS, GPT, WARM_UP, Config, standard_library, write_rows

import hopper_attention
from hopper_attention.integrations.context_parallel import context_forward, shard

LR_STEPS = 100  # until the learning rate is whole: whole at once, losses leap, and runs differ by how far
KEPT = functools.partial(create_selective_checkpoint_contexts, [context_forward])


class LongGPT(GPT):
    """A GPT that is told its tokens' places, and recomputes its layers but for attention."""

    def __init__(self, *of_a_gpt):
        super().__init__(*of_a_gpt)
        for block in self.blocks:  # inside FSDP's hooks, which gather a layer's parameters once for both
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=KEPT)

    def forward(self, text: torch.Tensor, following: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places(places)
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


def train(
    config: Config, seqlen: int, steps: int, device: torch.device, group: dist.ProcessGroup, seed: int = 0
) -> dict[str, object]:
    """Losses, and seconds of the median step after WARM_UP, of a group: all ranks, or this one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    attention = lambda q, k, v: hopper_attention.context_parallel_attention(q, k, v, group)
    torch.manual_seed(seed)
    with device:
        model = LongGPT(config, seqlen, attention).bfloat16()
    parameters = sum(x.numel() for x in model.parameters())
    if ranks > 1:
        in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients are added, then rounded
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=in_fp32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    warmer = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / LR_STEPS, total_iters=LR_STEPS)
    text, generator = standard_library().to(device), torch.Generator().manual_seed(seed)
    mine = lambda x: shard(x, rank, ranks, dim=-1)
    places = mine(torch.arange(seqlen, device=device))
    losses, seconds = [], []
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(steps):
        start = int(torch.randint(len(text) - seqlen - 1, (1,), generator=generator))
        taken = text[start : start + seqlen + 1].long()[None]
        synchronize()
        begin = time.perf_counter()
        loss = model(mine(taken[:, :-1]), mine(taken[:, 1:]), places)
        loss.backward()
        optimizer.step()
        warmer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, group=group)  # of as many tokens on every rank
        losses.append(mean.item() / ranks)
        seconds.append(time.perf_counter() - begin)
    taken_s = statistics.median(seconds[min(WARM_UP, steps // 2) :])
    flops = 6 * seqlen * parameters + 12 * config.layers * config.hidden * seqlen**2
    found = {"tokens_per_s": seqlen / taken_s, "tflops_per_gpu": flops / taken_s / 1e12 / ranks}
    return found | {"s": taken_s, "losses": losses}


def report(args: argparse.Namespace, ranks: int, everyone: list[dict[str, object]]) -> None:
    """What every one of some runs of so many ranks found."""
    for found in everyone:
        print(
            f"{args.model}, seqlen {args.seqlen} on {ranks} GPUs: {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['tflops_per_gpu']:.0f} TFLOP/s a GPU, {found['gib']:.0f} GiB, "
            f"last loss {found['losses'][-1]:.4f}",
            flush=True,
        )
    if args.save:
        rows = json.loads(args.save.read_text()) if args.save.exists() else []
        about = {"model": args.model, "seqlen": args.seqlen, "gpus": ranks}
        about |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        rows += [about | found for found in everyone]
        write_rows(args.save, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="small")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=int, default=1, help="more than one show by how much runs differ")
    parser.add_argument("--alone", type=int, default=0, help="and then so many of each GPU by itself")
    parser.add_argument("--save", type=Path, help="add what was measured to a JSON file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("examples/train_long.py: needs a CUDA GPU")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}.items():
        os.environ.setdefault(name, str(value))  # without torchrun one process
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    together = dist.new_group(list(range(ranks)))
    by_itself, _ = dist.new_subgroups(1)
    for group in [together] * args.runs + [by_itself] * args.alone:
        torch.cuda.reset_peak_memory_stats()
        found = train(CONFIGS[args.model], args.seqlen, args.steps, device, group)
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30
        everyone = [found] * ranks
        dist.all_gather_object(everyone, found)
        if rank == 0:
            report(args, group.size(), everyone[:1] if group is together else everyone)
        gc.collect()  # the model of this run, before the next one's
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
