"""The cases of `harness.cases` that are about the call: layouts, wrong inputs, streams, graphs, repeats,
sanitizers."""

import math
import shutil
import subprocess
import sys
from functools import partial

import torch

from harness import split_cases
from harness.case_runs import captured, differing, inputs_for, ready, refused, run, run_poisoned, small
from harness.inputs import poison
from harness.registry import case
from harness.results import repository
from harness.stages import starts_at_zero
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import BACKWARD

# ---- 7 to 9: layouts and wrong inputs ----------------------------------------------------------------------


@case()
def strided_views(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        q, k, v, *rest = inputs
        b, h, n, d = q.shape
        attend = lambda *x: run(stage_id, x, problem.causal)
        plain = attend(*inputs)
        heads = [x for x in inputs if x.dim() == 4]  # all but the LSE

        def among(views: list[torch.Tensor]) -> list[torch.Tensor]:
            views = iter(views)
            return [next(views) if x.dim() == 4 else x for x in inputs]

        packed = torch.stack([x.transpose(1, 2) for x in heads], dim=2)  # (B, N, 3 or 5, H, d)
        layouts = {
            "(B, N, H, d) memory": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads],
            "slices of a packed tensor": [packed[:, :, i].transpose(1, 2) for i in range(len(heads))],
            "(N, B, H, d) memory": [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in heads],
        }
        for name, views in layouts.items():
            for attempt in ("first", "second"):  # a stale stride or pointer shows on the second call
                for output in differing(stage_id, attend(*among(views)), plain):
                    yield f"{problem}: {output} of {name} differs on the {attempt} call"
            for output in differing(stage_id, attend(*inputs), plain):
                yield f"{problem}: {output} of a contiguous call after {name} differs"
        k1, v1 = k[:, :1].expand(b, h, n, d), v[:, :1].expand(b, h, n, d)  # stride 0
        copied = attend(q, k1.contiguous(), v1.contiguous(), *rest)
        for output in differing(stage_id, attend(q, k1, v1, *rest), copied):
            yield f"{problem}: {output} of expanded heads differs from that of copied ones"
        for _ in range(2):
            for at, x in enumerate(heads):
                bad = lambda view: attend(*among([*heads[:at], view, *heads[at + 1 :]]))
                columns = x.mT.contiguous().mT
                yield from refused(lambda: bad(columns), ValueError, "contiguous in its last dimension")
                shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x)
                yield from refused(lambda: bad(shifted), ValueError, "16-byte boundary")
                odd = torch.empty(b, h, n, d + 1, device="cuda", dtype=x.dtype)[..., :d]
                yield from refused(lambda: bad(odd), ValueError, "multiples of 8 elements")
        out = torch.empty(1, h, n, d, device="cuda", dtype=q.dtype).expand(b, h, n, d)
        outs = (torch.empty_like(q), out, torch.empty_like(q)) if rest else out
        yield from refused(
            lambda: run(stage_id, inputs, problem.causal, outs), ValueError, "must not overlap itself"
        )


@case()
def wrong_input(stage_id, args):
    direction = ladder.load(stage_id)[0].direction
    problem = Problem.square(2, 4, 64, 64, False, direction=direction)
    q, k, v, *rest = inputs_for(problem)
    attend = lambda *x: run(stage_id, (*x, *rest), False)
    on_cpu = tuple(x.cpu() for x in (q, k, v, *rest))
    yield from refused(lambda: run(stage_id, on_cpu, False), ValueError, "must be on a CUDA device")
    yield from refused(lambda: attend(q, k.cpu(), v), ValueError, "must be on one device")
    wide = (x.float() for x in (q, k, v))
    yield from refused(lambda: attend(*wide), TypeError, "must be bfloat16 or float16")
    yield from refused(lambda: attend(q, k.half(), v), TypeError, "must have one dtype")
    yield from refused(lambda: attend(q, k, v[:, :, 1:]), ValueError, "k and v must have one shape")
    yield from refused(lambda: attend(q[0], k, v), ValueError, "must have 4 dimensions")
    yield from refused(lambda: attend(q, k[:, :3], v[:, :3]), ValueError, "must be a multiple")
    yield from refused(lambda: attend(q, k[:1], v[:1]), ValueError, "must agree in batch")
    yield from refused(lambda: attend(q, None, v), TypeError, "must be a torch.Tensor")
    for d in (4, 59, 100, 288):
        x = torch.randn(1, 1, 16, d, device="cuda", dtype=torch.bfloat16)
        others = (x, torch.zeros(1, 1, 16, device="cuda"), x) if rest else ()
        yield from refused(lambda: run(stage_id, (x, x, x, *others), False), ValueError, "head_dim")
    # The raw launch, which the front end's checks do not precede, must not run on what it was not compiled
    # for.
    for name in ("q", "do") if rest else ("q",):
        module, compiled, tensors = ready(stage_id, (q, k, v, *rest), False)
        dtype = getattr(tensors, name).dtype
        shifted = torch.empty(q.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(q)
        setattr(tensors, name, shifted)
        yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "align")
        setattr(tensors, name, torch.empty_like(q, dtype=dtype)[:, :3])
        yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "")


@case("bwd")
def wrong_input_of_the_backward_pass(stage_id, args):
    q, k, v, o, lse, do = inputs_for(Problem.square(2, 4, 64, 64, False, direction="bwd"))
    attend = lambda **changes: run(
        stage_id, tuple(({"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do} | changes).values()), False
    )
    yield from refused(lambda: attend(do=None), TypeError, "do must be a torch.Tensor")
    yield from refused(lambda: attend(do=do.float()), ValueError, "do must be like q")
    yield from refused(lambda: attend(do=do[:, :, 1:]), ValueError, "do must be like q")
    yield from refused(lambda: attend(o=o.cpu()), ValueError, "o must be like q")
    yield from refused(lambda: attend(o=o[:, :2]), ValueError, "o must be like q")
    yield from refused(lambda: attend(lse=lse.double()), TypeError, "lse must be float32")
    yield from refused(lambda: attend(lse=lse[:, :, 1:]), ValueError, "lse must be (batch, heads, seqlen_q)")
    yield from refused(lambda: attend(lse=lse.mT.contiguous().mT), ValueError, "lse must be contiguous")


@case()
def empty(stage_id, args):
    direction = ladder.load(stage_id)[0].direction
    for b, h, n in ((2, 3, 0), (0, 3, 16), (2, 0, 16)):
        problem = Problem.square(b, h, n, 64, False, direction=direction)
        inputs = inputs_for(problem)
        for name, x in run(stage_id, inputs, False).items():
            expected = inputs[0].shape[:3] if name == "lse" else inputs[0].shape
            if x.shape != expected:
                yield f"{problem}: {name} is {tuple(x.shape)}"
    torch.cuda.synchronize()


# ---- 10 to 12: streams, graphs, repeats, sanitizers --------------------------------------------------------


@case()
def side_stream_with_a_pending_producer(stage_id, args):
    problem = small(stage_id)[0]
    inputs = inputs_for(problem)
    plain = run(stage_id, inputs, problem.causal)
    late_q = torch.zeros_like(inputs[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # ≈ 30 ms in which a launch on another stream would read zeros
        late_q.copy_(inputs[0])
        found = run(stage_id, (late_q, *inputs[1:]), problem.causal)
    torch.cuda.synchronize()
    for name in differing(stage_id, found, plain):
        yield f"{name}: did not wait for its own stream's producer"


@case()
def cuda_graph(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        module, compiled, tensors = ready(stage_id, inputs, problem.causal)
        graph = captured(partial(module.run_kernel, compiled, tensors))
        for seed in (1, 2):
            new = inputs_for(problem, seed=seed)
            _, _, other = ready(stage_id, new, problem.causal)
            for name in ("q", "k", "v", "o", "lse", "do") if len(new) > 3 else ("q", "k", "v"):
                getattr(tensors, name).copy_(getattr(other, name))
            poison(tensors)
            graph.replay()
            torch.cuda.synchronize()
            for name in differing(stage_id, tensors.outputs, run(stage_id, new, problem.causal)):
                yield f"{problem}: {name} of a replay with new data differs from eager"


@case()
def repeats(stage_id, args):
    """Launches on the same tensors, scratch included, give the same; with float atomics the spread is
    printed."""
    square = small(stage_id, seqlen_q=1025, seqlen_kv=1025)
    square += [problem.with_(head_dim=256) for problem in square if problem.head_dim == 128]
    unequal = small(stage_id, seqlen_q=257, seqlen_kv=1025)
    unequal = [problem.with_(top_left=True) for problem in unequal if problem.causal]
    supports = ladder.load(stage_id)[1].supports
    for problem in (problem for problem in (*square, *unequal) if supports(problem) is None):
        inputs = inputs_for(problem)
        mask = {"causal": problem.causal, "top_left": problem.top_left}
        first = run_poisoned(stage_id, inputs, **mask)
        module, compiled, tensors = ready(stage_id, inputs, **mask)
        differ = 0
        spread = {name: torch.zeros((), device="cuda") for name in first}
        for _ in range(args.repeats):
            for x in tensors.outputs.values():
                x.fill_(math.nan)
            module.run_kernel(compiled, tensors)
            differ += bool(differing(stage_id, tensors.outputs, first))
            for name, x in tensors.outputs.items():
                spread[name] = torch.maximum(spread[name], (x.float() - first[name].float()).abs().max())
        if differ:
            yield f"{problem}: {differ} of {args.repeats} repeats differ"
        for name, x in tensors.workspace.items():
            if starts_at_zero(name, str(x.dtype).removeprefix("torch.")) and x.any():
                yield f"{problem}: scratch {name!r} is not left at zero"
        if ladder.load(stage_id)[0].atomics:
            share = {name: x.item() / first[name].abs().max().item() for name, x in spread.items()}
            text = ", ".join(f"{name} {value:.2g}" for name, value in share.items())
            print(f"    {problem}: spread of {args.repeats} repeats, of the largest: {text}", flush=True)


@case()
def beside_memory_traffic(stage_id, args):
    """Loads that arrive late and in another order must neither hang the kernel nor change its output."""
    for problem in small(stage_id, seqlen_q=1025, seqlen_kv=1025):
        inputs = inputs_for(problem)
        first = run_poisoned(stage_id, inputs, problem.causal)
        module, compiled, tensors = ready(stage_id, inputs, problem.causal)
        source = torch.empty(2**28, dtype=torch.int8, device="cuda")
        traffic, other = torch.cuda.Stream(), torch.empty_like(source)
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(traffic):
                other.copy_(source, non_blocking=True)
            for x in tensors.outputs.values():
                x.fill_(math.nan)
            for _ in range(5):
                module.run_kernel(compiled, tensors)
            if differing(stage_id, tensors.outputs, first):
                yield f"{problem}: differs beside memory traffic"
                break
        torch.cuda.synchronize()


@case()
def sanitizer(stage_id, args):
    if args.no_sanitizer:
        print("    sanitizer: left out by --no-sanitizer", flush=True)
        return
    program = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if program is None:
        yield "compute-sanitizer is not installed; --no-sanitizer leaves it out"
        return
    for tool in ("memcheck", "synccheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", __name__, stage_id]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=repository())
        if run.returncode or "ERROR SUMMARY: 0 errors" not in run.stdout:
            said = run.stdout + run.stderr
            if len(said) > 2500:  # the first error, and how it ended
                said = f"{said[:1500]}\n[…]\n{said[-1000:]}"
            yield f"{tool}: {said}"


def one_launch(stage_id: str) -> None:
    """Small launches and nothing else, for a sanitizer to watch."""
    problems = small(stage_id, batch=1, heads=2, kv_heads=2, seqlen_q=113, seqlen_kv=113)
    problems += [x.with_(head_dim=256) for x in problems if x.head_dim == 128]
    problems += [x.with_(seqlen_kv=401, top_left=True) for x in problems if x.causal]  # keys that none sees
    problems += split_cases.left_over()[:1] if stage_id == BACKWARD else []
    for problem in problems:
        if ladder.load(stage_id)[1].supports(problem) is None:
            run(stage_id, inputs_for(problem), problem.causal, top_left=problem.top_left)
    torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """What the sanitizers run: `one_launch` of a stage that `ref_check.py` takes."""
    if len(arguments) != 1 or arguments[0] not in ladder.CHECKED:
        sys.exit("harness.call_cases: give one of the stages that ref_check.py takes")
    one_launch(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
