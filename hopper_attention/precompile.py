"""Fill the cache of compiled kernels ahead of the first call.

    python -m hopper_attention.precompile             the kernels of `attention` and its backward pass; of few
                                                      queries beside many keys alone: `few_queries`
    python -m hopper_attention.precompile policies    those with windows, soft caps, sinks, packed sequences
    python -m hopper_attention.precompile fp8         those of `attention_fp8` and `quantize`
    python -m hopper_attention.precompile k2 bwd3     of other stages; `all` for the ladder
    python -m hopper_attention.precompile decode --head-dim 128 --dtype bfloat16 --page-size 16
                                                      those of `flash_attn_with_kvcache`, which are thousands:
                                                      of one model's heads and one kind of cache

Needs no GPU. One process a core, each compiles what no other is compiling.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from . import cache, few_queries, tuned
from .kernels import ladder
from .kernels.calls_decode import chunk_of
from .kernels.contract import DTYPES
from .kernels.device.constants import SMS
from .launch import (
    DECODE,
    LIBRARY,
    QUANTIZE,
    WITH_POLICIES,
    Job,
    is_kept,
    kernel_for,
    reachable,
    reachable_in_decode,
    reachable_in_fp8,
    reachable_with_policies,
    sms_option,
)

FP8, POLICIES, FEW_QUERIES = "fp8", "policies", "few_queries"  # beside stage ids


def jobs_of(stage_id: str, sms: int = SMS) -> list[Job]:
    """Every kernel of a stage, or of "fp8", "policies" or "few_queries", that a call can reach on a GPU with
    so many SMs."""
    if stage_id == FEW_QUERIES:
        return [(DECODE, what, options | sms_option(sms)) for what, options in few_queries.kernels()]
    if stage_id == DECODE:
        return [(name, what, options | sms_option(sms)) for name, what, options in reachable_in_decode()]
    if stage_id == FP8:
        of_sms = lambda name: {} if name == QUANTIZE else sms_option(sms)
        return [(name, what, options | of_sms(name)) for name, what, options in reachable_in_fp8()]
    if stage_id == POLICIES:
        options = {name: ladder.load(name)[0].options | sms_option(sms) for name in WITH_POLICIES}
        return [(name, what, x) for name, x in options.items() for what in reachable_with_policies(name)]
    options = ladder.load(stage_id)[0].options | (sms_option(sms) if stage_id in LIBRARY else {})
    return [(stage_id, problem, options) for problem in reachable(stage_id)]


class NotKept(RuntimeError):
    """Kernels that were compiled, and that the next process will compile again."""


def fill(jobs: Iterable[Job], workers: int | None = None) -> int:
    """Compile what the cache lacks; how many kernels it has then. Raises what a compile raises, and NotKept
    where some cannot be kept."""
    if cache.folder() is None:
        raise NotKept(
            "there is no folder to keep compiled kernels in that is the user's own and that nobody else can "
            f"write; name one in {cache.VARIABLE}"
        )
    jobs = list({repr(job): job for job in jobs}.values())
    workers = min(workers or len(os.sched_getaffinity(0)), len(jobs)) or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        kept = list(pool.map(_compile, jobs))
    if lost := kept.count(False):
        raise NotKept(f"{lost} of {len(jobs)} kernels cannot be written to {cache.folder()}")
    return len(jobs)


def ahead(jobs: Iterable[Job]) -> None:
    """`fill` for who is about to run the kernels, one after the other. Where nothing can be kept each is
    compiled when it is run."""
    if cache.folder() is not None:
        with contextlib.suppress(NotKept):
            fill(jobs)


def _compile(job: Job) -> bool:
    """Whether it could be kept, too."""
    kernel_for(*job)
    return is_kept(*job)


def _wanted(job: Job, args: argparse.Namespace) -> bool:
    stage_id, problem, options = job
    if args.head_dim not in (None, problem.head_dim) or args.dtype not in (None, problem.dtype):
        return False
    if stage_id != DECODE or args.page_size is None:
        return True
    return options["box"] == min(args.page_size, chunk_of(problem.head_dim, options["eight_bits"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hopper_attention.precompile", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "stages",
        nargs="*",
        default=[*LIBRARY, FEW_QUERIES],
        help="stage ids, `few_queries`, `all`, `policies`, `fp8` or `decode`",
    )
    parser.add_argument("--head-dim", type=int, help="only kernels for heads of this size")
    parser.add_argument("--dtype", choices=DTYPES, help="only kernels for queries of this type")
    parser.add_argument("--page-size", type=int, help="of decode only kernels for such pages; 0: none")
    here = tuned.gpu().sms
    parser.add_argument("--sms", type=int, default=here, help=f"SMs of the GPU, by default {here}")
    parser.add_argument("--workers", type=int, help="processes; by default one a core")
    args = parser.parse_args(arguments)
    for name, number in (("sms", args.sms), ("workers", args.workers)):
        if number is not None and number < 1:
            parser.error(f"--{name} must be a positive number, not {number}")
    try:
        stages = ladder.stages_named(args.stages)
        jobs = [job for stage_id in stages for job in jobs_of(stage_id, args.sms) if _wanted(job, args)]
        if not jobs:
            raise ValueError(f"no kernel of {', '.join(stages)} is for that head_dim, type and page size")
        count = fill(jobs, args.workers)
    except (ValueError, RuntimeError) as error:
        print(f"hopper_attention.precompile: {error}", file=sys.stderr)
        return 2
    print(f"{count} kernels of {', '.join(stages)} in {cache.folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
