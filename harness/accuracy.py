"""How far FP8 is from float64 attention of the inputs as they were before they were rounded to 8 bits.

    python -m harness.accuracy            print the tables
    python -m harness.accuracy --save     and keep them in results/<gpu>/library/accuracy.json

Four questions, each with every contender beside the others on the same inputs: the error on inputs with and
without outliers, of what runs by default and of options that are off; what a long sequence does to it; and
whether one key in so many is still found.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from harness import judging, peers, quantized, reference, results, row_files, timing
from harness.command import Parser, Usage, as_usage, run
from harness.inputs import hopper_gpu
from harness.stages import allocate
from hopper_attention import attention, production_fp8
from hopper_attention.fp8 import less_mean
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem
from hopper_attention.kernels.device.fp8 import E4M3_MAX, LARGEST_IN_HALF
from hopper_attention.launch import compile_kernel

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SEEDS = range(10)
OUTLIERS = Problem.square(1, 16, 4096, 128, False)
LENGTHS = (1024, 4096, 16384, 65536, 131072)  # of keys
ROWS = 256  # of queries, where keys are many
DEPTHS = 32  # of the sequence, at which a needle lies
WORDS = 64  # that a needle may say
WEIGHT = 0.02  # of a needle in its row's softmax
NEVER = 2**30


# ---- inputs ------------------------------------------------------------------------------------------------


def normal(problem: Problem, generator: torch.Generator) -> Inputs:
    """q, k, v ~ N(0, 1)."""
    return _drawn(problem, generator, lambda x, _: x)


def rare_outliers(problem: Problem, generator: torch.Generator, deviation: float = 10.0) -> Inputs:
    """N(0, 1) + N(0, deviation²)·Bernoulli(0.001), by default the inputs of FlashAttention-3's Table 3
    (arXiv 2407.08608)."""

    def with_outliers(x: torch.Tensor, _: str) -> torch.Tensor:
        struck = torch.rand(x.shape, generator=generator, device=x.device) < 1e-3
        return x + deviation * torch.randn(x.shape, generator=generator, device=x.device) * struck

    return _drawn(problem, generator, with_outliers)


def outlier_channels(problem: Problem, generator: torch.Generator) -> Inputs:
    """N(0, 1), but four channels of k are 50 times as large."""
    factors = torch.ones(problem.head_dim, device=generator.device)
    factors[:: problem.head_dim // 4] = 50.0
    return _drawn(problem, generator, lambda x, name: x * factors if name == "k" else x)


def shifted_keys(problem: Problem, generator: torch.Generator) -> Inputs:
    """N(0, 1), and to every k of a head one vector added, of N(0, 100): no weight of a softmax changes."""
    q, k, v = normal(problem, generator)
    vectors = k.new_empty(problem.batch, problem.kv_heads, 1, problem.head_dim, dtype=torch.float32)
    return q, (k.float() + 10.0 * vectors.normal_(generator=generator)).to(torch.bfloat16), v


def one_sided(problem: Problem, generator: torch.Generator) -> Inputs:
    """q ~ N(0, 0.01), k ~ N(0, 1), v = |N(0, 1)|: weights are nearly equal, and no sum over keys cancels."""
    scaled = {"q": lambda x: 0.1 * x, "k": lambda x: x, "v": torch.Tensor.abs}
    return _drawn(problem, generator, lambda x, name: scaled[name](x))


def _drawn(problem: Problem, generator: torch.Generator, change: Callable) -> Inputs:
    kv_shape = problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim
    shapes = {
        "q": (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
        "k": kv_shape,
        "v": kv_shape,
    }
    draw = lambda shape: torch.randn(shape, generator=generator, device=generator.device)
    return tuple(change(draw(shape), name).to(torch.bfloat16) for name, shape in shapes.items())


def needles(problem: Problem, generator: torch.Generator) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """`one_sided` inputs in which query i finds one key, at depth i/DEPTHS of the sequence, by a logit that
    gives it WEIGHT of its softmax, and its value is one of WORDS words of ±1; the words (WORDS, d); and which
    of them each query must read (DEPTHS,). Queries are DEPTHS."""
    q, k, v = (x.float() for x in one_sided(problem, generator))
    device, d, keys = generator.device, problem.head_dim, problem.seqlen_kv
    at = torch.arange(DEPTHS, device=device) * (keys // DEPTHS) + keys // DEPTHS // 2
    said = torch.randint(0, WORDS, (DEPTHS,), generator=generator, device=device)
    words = torch.randint(0, 2, (WORDS, d), generator=generator, device=device) * 2.0 - 1.0
    v[:, :, at] += words[said]
    # softmax weight w of a logit x beside n others near 0: e^x = n·w/(1 − w)
    logit = math.log(keys * WEIGHT / (1 - WEIGHT))
    target = k[:, :, at]
    q = target * (logit * math.sqrt(d) / target.square().sum(-1, keepdim=True))
    return tuple(x.to(torch.bfloat16) for x in (q, k, v)), words, said


# ---- contenders --------------------------------------------------------------------------------------------


def in_16_bits(problem: Problem, q, k, v) -> torch.Tensor:
    return attention(q, k, v, causal=problem.causal)


def by_stage(stage_id: str, **options: object) -> Attend:
    """A stage with options of its file. To one that reads codes they are given with a scale for each
    tensor."""

    def attend(problem: Problem, q, k, v) -> torch.Tensor:
        stage, module = ladder.load(stage_id)
        problem = problem.with_(direction=stage.direction)
        tensors = allocate(module, problem, q, k, v, **options)
        if problem.reads_codes:
            in_half = options.get("in_half", False)
            largest = LARGEST_IN_HALF[problem.head_dim] if in_half else E4M3_MAX
            *codes, scales = in_codes(q, k, v, largest=(largest, largest, E4M3_MAX))
            weights = quantized.codes(torch.ones(v.shape[:3], device=v.device))
            tensors.q, tensors.k, tensors.v = *codes[:2], quantized.transposed(codes[2], weights)
            tensors.scales = tuple(x.expand(*k.shape[:2])[..., None].contiguous() for x in scales)
        module.run_kernel(compile_kernel(stage_id, problem, **options), tensors)
        return tensors.o

    return attend


def by_peer(name: str) -> Attend:
    """A peer in FP8, with a scale for each tensor."""

    def attend(problem: Problem, q, k, v) -> torch.Tensor:
        turned = (lambda x: x.transpose(1, 2).contiguous()) if peers.PEERS[name].rows_first else (lambda x: x)
        *codes, scales = in_codes(q, k, v)
        return turned(peers.PEERS[name].fp8(problem, *map(turned, codes), scales)())

    return attend


def of_centred_keys(attend: Attend) -> Attend:
    """The same of k as `quantize` with `centred` has it, which changes no weight of a softmax."""
    return lambda problem, q, k, v: attend(problem, q, less_mean(k), v)


def in_codes(*tensors: torch.Tensor, largest: Iterable[float] = itertools.repeat(E4M3_MAX)) -> tuple:
    """e4m3 codes of each, with the scale (1, 1) by which its largest value is its `largest` code."""
    scales = [quantized.full_scale(x) * (E4M3_MAX / code) for x, code in zip(tensors, largest)]
    return *(quantized.codes(x.float() / scale) for x, scale in zip(tensors, scales)), scales


def yardstick(stage_id: str, **options: object) -> Attend:
    """What the quantisation and the roundings of a stage with options of its file, and nothing else, make of
    the inputs."""

    def attend(problem: Problem, q, k, v) -> torch.Tensor:
        stage, module = ladder.load(stage_id)
        problem, every = problem.with_(direction=stage.direction), {**stage.options, **options}
        rounding: LazyMaximum = module.lazy_maximum(problem, **every)
        exponents = None
        if rounding.quantized:
            made = judging.Expected(q, k, v, problem.causal).quantized(rounding.quantized)
            (q, k, v), exponents = made.inputs, made.exponents
        else:
            *codes, scales = in_codes(q, k, v)
            q, k, v = (x.float() * scale for x, scale in zip(codes, scales))
        given = {"exponents": exponents, "dtype": torch.bfloat16}
        return reference.yardstick_of(q, k, v, problem.causal, rounding, **given)[0]

    return attend


def rotated(attend: Attend) -> Attend:
    """The same of q and k after k8's rotation, in fp32."""

    def of_rotated(problem: Problem, q, k, v) -> torch.Tensor:
        signs = production_fp8.signs(problem.head_dim).to(q.device)
        return attend(problem, *(quantized.rotated(x.float(), signs) for x in (q, k)), v)

    return of_rotated


STAGES: dict[str, Attend] = {
    "k6": in_16_bits,
    "k7": by_stage("k7"),
    "k7, scales of blocks": by_stage("k8", rotate=False),  # k7's kernel, as its `block_scales` has it
    "k8": by_stage("k8"),
}
YARDSTICKS: dict[str, Attend] = {
    "k7's yardstick": yardstick("k7"),
    "k7's yardstick, rotated": rotated(yardstick("k7")),
    "k7's yardstick, scales of blocks": yardstick("k8", rotate=False),
    "k8's yardstick": yardstick("k8"),
}
PEERS: dict[str, Attend] = {name: by_peer(name) for name, peer in peers.PEERS.items() if peer.fp8}
FLUSHED: dict[str, Attend] = {
    "k7": by_stage("k7"),
    "k7, flushed every 1024": by_stage("k7", flush_keys=1024),
    "k7, never flushed": by_stage("k7", flush_keys=NEVER),
}
# Options that are off, by their names in k7's ablation where they are k7's.
WITHOUT_EXPONENTIALS: dict[str, dict[str, object]] = {
    "32 of 128 keys without exponentials": {"direct_keys": 32},
    "64 of 128 keys without exponentials": {"direct_keys": 64},
    "128 of 128 keys without exponentials": {"direct_keys": 128},
    "128, and scores in fp16": {"direct_keys": 128, "in_half": True},
}
OPTIONS: dict[str, Attend] = {
    f"{stage}, {option}" if option else stage: by_stage(stage, **chosen)
    for stage in ("k7", "k8")
    for option, chosen in ({"": {}} | WITHOUT_EXPONENTIALS).items()
} | {"k8, K less its mean": of_centred_keys(by_stage("k8"))}


# ---- questions ---------------------------------------------------------------------------------------------


Row = dict[str, Any]
Draw = Callable[[Problem, torch.Generator], Inputs]
DRAWS = normal, rare_outliers, outlier_channels


def outliers(
    contenders: dict[str, Attend], problem: Problem = OUTLIERS, draws: tuple[Draw, ...] = DRAWS
) -> Iterator[Row]:
    """Root mean square of O − O of float64, mean and spread over SEEDS."""
    for draw in draws:
        errors: dict[str, list[float]] = {}
        for seed in SEEDS:
            inputs = draw(problem, torch.Generator(device()).manual_seed(seed))
            exact = reference.reference(*inputs, problem.causal)[0]
            for name, found in _attempts(contenders, problem, inputs):
                errors.setdefault(name, []).append((found.double() - exact).square().mean().sqrt().item())
        for name, of_seeds in errors.items():
            mean, spread = statistics.fmean(of_seeds), statistics.pstdev(of_seeds)
            yield {
                "inputs": draw.__name__,
                "problem": str(problem),
                "contender": name,
                "rmse": mean,
                "spread": spread,
            }


def long_sums(contenders: dict[str, Attend], lengths: tuple[int, ...] = LENGTHS) -> Iterator[Row]:
    """Root mean square error relative to that of O, by number of keys."""
    for draw in (normal, one_sided):
        for keys in lengths:
            problem = Problem(1, 2, 2, ROWS, keys, 128, False)
            inputs = draw(problem, torch.Generator(device()).manual_seed(0))
            exact = reference.reference(*inputs, False)[0]
            size = exact.square().mean().sqrt().item()
            for name, found in _attempts(contenders, problem, inputs):
                error = (found.double() - exact).square().mean().sqrt().item() / size
                yield {"inputs": draw.__name__, "keys": keys, "contender": name, "relative_rmse": error}


def found_needles(contenders: dict[str, Attend], lengths: tuple[int, ...] = LENGTHS) -> Iterator[Row]:
    """Share of needles read right: the word nearest to O less the mean of V."""
    for keys in lengths:
        problem = Problem(1, 8, 8, DEPTHS, keys, 128, False)
        inputs, words, said = needles(problem, torch.Generator(device()).manual_seed(0))
        background = inputs[2].float().mean(2, keepdim=True)
        for name, found in _attempts(contenders, problem, inputs):
            read = ((found.float() - background) @ words.mT).argmax(-1)
            yield {"keys": keys, "contender": name, "found": (read == said).float().mean().item()}


QUESTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "outliers": lambda: outliers(STAGES | YARDSTICKS | PEERS),
    "options": lambda: outliers(OPTIONS, draws=(*DRAWS, shifted_keys)),
    "long sums": lambda: long_sums({"k6": in_16_bits} | FLUSHED | PEERS),
    "needles": lambda: found_needles({"k6": in_16_bits} | FLUSHED | PEERS),
}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _attempts(
    contenders: dict[str, Attend], problem: Problem, inputs: Inputs
) -> Iterator[tuple[str, torch.Tensor]]:
    """O of each contender that can; one of a peer that cannot is left out, one of ours is an error."""
    for name, attend in contenders.items():
        try:
            yield name, attend(problem, *inputs)
        except Exception:
            if name not in PEERS:
                raise


def measure(arguments: list[str] | None) -> bool:
    parser = Parser(prog="harness.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--save", nargs="?", const=results.results_dir(), type=Path, help="write the rows")
    args = parser.parse_args(arguments)
    if not hopper_gpu():
        raise Usage("the kernels need a Hopper GPU")
    environment = timing.environment(peers.versions(list(PEERS), "fp8"))
    if args.save:
        with as_usage(ValueError):  # rows of a peer that is not here, or of another environment, stay
            row_files.rows_to_join(args.save, "accuracy", environment)
    rows = []
    for question, ask in QUESTIONS.items():
        for row in ask():
            rows.append({"question": question, **row})
            print(question, *(f"{x:.3g}" if isinstance(x, float) else x for x in row.values()), flush=True)
    if args.save:
        row_files.save("accuracy", rows, environment, args.save)
    return True


def main(arguments: list[str] | None = None) -> int:
    return run("harness.accuracy", lambda: measure(arguments))


if __name__ == "__main__":
    sys.exit(main())
