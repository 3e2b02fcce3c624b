"""The cases every forward stage must compute correctly or refuse by name; run by `python ref_check.py
<stage>`.

A case is a generator of messages, one for each thing that went wrong. Without a GPU the stage's NumPy model
stands in and no kernel is executed.
"""

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

import kernels
import ref_check
from harness import models
from harness.attention import attention, prepare, problem_of
from harness.inputs import hopper_gpu, poison, random_inputs
from harness.problem import HEAD_DIMS, Problem
from harness.results import repository

LENGTHS = (1, 3, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257, 1023, 1025, 4097)
NEEDLE_LENGTHS = (16, 64, 65, 257, 1024, 4097)
SMALL = [Problem.square(2, 3, 203, d, causal) for d in HEAD_DIMS for causal in (False, True)]
CASES: dict[str, Callable[[str, object], Iterator[str]]] = {}
worst_seen: dict[str, float] = {}


def case(function: Callable) -> Callable:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def run_poisoned(stage_id: str, q, k, v, causal: bool):
    """O and LSE of the stage, into outputs and scratch filled with NaN."""
    module, compiled, tensors = prepare(q, k, v, causal=causal, stage=stage_id)
    module.run_kernel(compiled, poison(tensors))
    return tensors.o, tensors.lse


def judged(stage_id: str, q, k, v, causal: bool, what: object) -> Iterator[str]:
    stage, module = kernels.load(stage_id)
    o, lse = run_poisoned(stage_id, q, k, v, causal)
    rounding = ref_check.rounding_of(stage, module, problem_of(q, k, v, causal))
    verdict = ref_check.check(q, k, v, causal, o, lse, rounding)
    for name in ("max_ratio", "rms_ratio", "block_rms_ratio", "row_rms_ratio", "lse_error"):
        worst_seen[name] = max(worst_seen.get(name, 0.0), getattr(verdict, name))
    for failure in verdict.failures:
        yield f"{what}: {failure}"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-identical, NaN included."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def refused(call: Callable[[], object], error: type[Exception], words: str) -> Iterator[str]:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            yield f"refused with {raised!s:.120}, expected a message with {words!r}"
    else:
        yield f"not refused, expected {error.__name__} with {words!r}"


# ---- 1 to 4: the values ------------------------------------------------------------------------------------


@case
def lengths(stage_id, args):
    for n in LENGTHS:
        for d in HEAD_DIMS:
            for causal in (False, True):
                problem = Problem.square(2, 3, n, d, causal)
                yield from judged(stage_id, *random_inputs(problem, seed=n), causal, problem)


@case
def needle(stage_id, args):
    for n in NEEDLE_LENGTHS:
        for d in HEAD_DIMS:
            for causal in (False, True):
                problem = Problem.square(1, 2, n, d, causal)
                q, k, v, target = ref_check.needle_inputs(problem, "cuda")
                o, lse = run_poisoned(stage_id, q, k, v, causal)
                wrong = (o != v[:, :, target]).any(-1).nonzero()
                if len(wrong):
                    row = wrong[0, 2].item()
                    key = target[row].item()
                    yield f"{problem}: {len(wrong)} rows miss their key, first row {row} (key {key})"
                ref_lse = ref_check.reference(q, k, v, causal)[1]
                if not ((lse - ref_lse).abs() <= ref_check.LSE_TOLERANCE * ref_lse.abs()).all():
                    off = (lse - ref_lse).abs().max().item()
                    yield f"{problem}: LSE off by {off:.3g}: a tile counted twice?"


@case
def output_inside_a_larger_allocation(stage_id, args):
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        b, h, n, d = q.shape
        big = torch.randn(b + 2, h + 2, n + 2, d + 16, device="cuda").to(q.dtype)
        before = big.clone()
        out = big[1:-1, 1:-1, 1:-1, 8:-8].fill_(math.nan)
        attention(q, k, v, causal=problem.causal, stage=stage_id, out=out)
        if not same(out, attention(q, k, v, causal=problem.causal, stage=stage_id)):
            yield f"{problem}: an output view differs from a fresh output"
        big[1:-1, 1:-1, 1:-1, 8:-8] = before[1:-1, 1:-1, 1:-1, 8:-8]
        if not same(big, before):
            yield f"{problem}: wrote outside of the output"


@case
def keys_and_values_inside_nan(stage_id, args):
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        inside = []
        for x in (q, k, v):
            b, h, n, d = x.shape
            big = torch.full((b, h, n + 128, d), math.nan, device="cuda", dtype=x.dtype)
            big[:, :, :n] = x
            inside.append(big[:, :, :n])
        plain = attention(q, k, v, causal=problem.causal, stage=stage_id)
        if not same(attention(*inside, causal=problem.causal, stage=stage_id), plain):
            yield f"{problem}: what lies beyond the sequence changes the output"


@case
def constant_values(stage_id, args):
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        columns = torch.randn_like(v[:, :, :1])
        for name, constant in (
            ("1", torch.ones_like(v)),
            ("its column's constant", columns.expand_as(v).contiguous()),
        ):
            o, _ = run_poisoned(stage_id, q, k, constant, problem.causal)
            if not torch.allclose(o.float(), constant.float(), rtol=2**-8, atol=0):
                yield f"{problem}: V = {name} gives O up to {(o - constant).abs().max().item():.3g} away"


@case
def other_shapes(stage_id, args):
    """GQA, unequal lengths, fp16 and head_dim 256: computed correctly, or refused by name."""
    _, module = kernels.load(stage_id)
    plain = Problem.square(1, 4, 203, 64, False)
    problems = [
        plain.with_(causal=causal, **changes)
        for causal in (False, True)
        for changes in (
            {"heads": 32, "kv_heads": 8},
            {"heads": 16, "kv_heads": 1, "head_dim": 128},
            {"seqlen_kv": 1025},
            {"seqlen_q": 1025, "head_dim": 128},  # causal: the first 822 queries see no key
            {"seqlen_q": 1},
            {"seqlen_kv": 1, "head_dim": 128},
            {"seqlen_q": 257, "seqlen_kv": 4161, "heads": 8, "kv_heads": 2},
            {"dtype": "float16"},
            {"dtype": "float16", "head_dim": 128, "seqlen_q": 1025, "seqlen_kv": 1025},
            {"head_dim": 256},
            {"head_dim": 256, "seqlen_q": 1025, "seqlen_kv": 4097, "kv_heads": 2},
        )
    ]
    for problem in problems:
        q, k, v = random_inputs(problem)
        if reason := module.supports(problem):
            run = lambda: attention(q, k, v, causal=problem.causal, stage=stage_id)
            yield from refused(run, ValueError, reason)
        else:
            yield from judged(stage_id, q, k, v, problem.causal, problem)


# ---- 5 and 6: masking and extreme logits -------------------------------------------------------------------


@case
def causality(stage_id, args):
    for d in HEAD_DIMS:
        q, k, v = random_inputs(Problem.square(2, 3, 203, d, True))
        plain = attention(q, k, v, causal=True, stage=stage_id)
        for row in (0, 62, 63, 64, 127, 200):
            k2, v2 = k.clone(), v.clone()
            k2[:, :, row + 1 :], v2[:, :, row + 1 :] = 1e4, 1e4
            later = attention(q, k2, v2, causal=True, stage=stage_id)
            if not same(later[:, :, : row + 1], plain[:, :, : row + 1]):
                yield f"d{d}: keys after row {row} change rows up to it"


@case
def extreme_logits(stage_id, args):
    # One FFMA for scale·s − scale·max leaves a product's rounding in the exponent of the largest score: its P
    # is then not 1, and where P is rounded to 16 bits, O is its value times that rounding.
    slack = 2**-7 if kernels.load(stage_id)[0].rounds_p else 0.0
    for logit in (3e4, 1e6):
        for d in HEAD_DIMS:
            for causal in (False, True):
                problem = Problem.square(1, 2, 203, d, causal)
                q, k, v, target = ref_check.needle_inputs(problem, "cuda", amplitude=logit / math.sqrt(d))
                o, lse = run_poisoned(stage_id, q, k, v, causal)
                if not (o.isfinite().all() and lse.isfinite().all()):
                    yield f"{problem}: logits of {logit:.0e} give non-finite values"
                elif not torch.allclose(o.float(), v[:, :, target].float(), rtol=slack, atol=0):
                    yield f"{problem}: logits of {logit:.0e} do not select the largest"
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        yield from judged(stage_id, torch.zeros_like(q), k, v, problem.causal, f"{problem}, q = 0")


# ---- 7 to 9: layouts and wrong inputs ----------------------------------------------------------------------


@case
def strided_views(stage_id, args):
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        b, h, n, d = q.shape
        plain = attention(q, k, v, causal=problem.causal, stage=stage_id)
        run = lambda *x: attention(*x, causal=problem.causal, stage=stage_id)
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)  # (B, N, 3, H, d)
        views = {
            "(B, N, H, d) memory": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
            "slices of a packed QKV": [packed[:, :, i].transpose(1, 2) for i in range(3)],
            "(N, B, H, d) memory": [
                x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v)
            ],
        }
        for name, view in views.items():
            for attempt in ("first", "second"):  # a stale stride or pointer shows on the second call
                if not same(run(*view), plain):
                    yield f"{problem}: {name} differs on the {attempt} call"
            if not same(run(q, k, v), plain):
                yield f"{problem}: a contiguous call after {name} differs"
        k1, v1 = k[:, :1].expand(b, h, n, d), v[:, :1].expand(b, h, n, d)  # stride 0
        if not same(run(q, k1, v1), run(q, k1.contiguous(), v1.contiguous())):
            yield f"{problem}: expanded heads differ from copied ones"
        for _ in range(2):
            yield from refused(
                lambda: run(q.mT.contiguous().mT, k, v), ValueError, "contiguous in its last dimension"
            )
            shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view_as(q)
            yield from refused(lambda: run(shifted, k, v), ValueError, "16-byte boundary")
            odd = torch.empty(b, h, n, d + 1, device="cuda", dtype=q.dtype)[..., :d]
            yield from refused(lambda: run(q, odd, v), ValueError, "multiples of 8 elements")
        out = torch.empty(1, h, n, d, device="cuda", dtype=q.dtype).expand(b, h, n, d)
        yield from refused(
            lambda: attention(q, k, v, causal=problem.causal, stage=stage_id, out=out),
            ValueError,
            "overlap itself",
        )


@case
def wrong_input(stage_id, args):
    q, k, v = random_inputs(Problem.square(2, 4, 64, 64, False))
    run = lambda *x: attention(*x, stage=stage_id)
    yield from refused(lambda: run(q.cpu(), k.cpu(), v.cpu()), ValueError, "must be on a CUDA device")
    yield from refused(lambda: run(q, k.cpu(), v), ValueError, "must be on one device")
    yield from refused(lambda: run(q.float(), k.float(), v.float()), TypeError, "must be bfloat16 or float16")
    yield from refused(lambda: run(q, k.half(), v), TypeError, "must have one dtype")
    yield from refused(lambda: run(q, k, v[:, :, 1:]), ValueError, "k and v must have one shape")
    yield from refused(lambda: run(q[0], k, v), ValueError, "must have 4 dimensions")
    yield from refused(lambda: run(q, k[:, :3], v[:, :3]), ValueError, "must be a multiple")
    yield from refused(lambda: run(q, k[:1], v[:1]), ValueError, "must agree in batch")
    yield from refused(lambda: run(q, None, v), TypeError, "must be a torch.Tensor")
    for d in (4, 59, 96, 288):
        x = torch.randn(1, 1, 16, d, device="cuda", dtype=torch.bfloat16)
        yield from refused(lambda: run(x, x, x), ValueError, "head_dim")
    # The raw launch, which the front end's checks do not precede, must not run on what it was not compiled
    # for.
    module, compiled, tensors = prepare(q, k, v, stage=stage_id)
    tensors.q = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view_as(q)
    yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "align")
    tensors.q = q[:, :3]
    yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "")


@case
def empty(stage_id, args):
    for shape in ((2, 3, 0, 64), (0, 3, 16, 64), (2, 0, 16, 64)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        o, lse = attention(x, x, x, stage=stage_id, return_lse=True)
        if o.shape != shape or lse.shape != shape[:3]:
            yield f"shape {shape}: O is {tuple(o.shape)}"
    torch.cuda.synchronize()


# ---- 10 to 12: streams, graphs, repeats, sanitizers --------------------------------------------------------


@case
def side_stream_with_a_pending_producer(stage_id, args):
    q, k, v = random_inputs(SMALL[0])
    plain = attention(q, k, v, stage=stage_id)
    late_q, out = torch.zeros_like(q), torch.empty_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # ≈ 30 ms in which a launch on another stream would read zeros
        late_q.copy_(q)
        attention(late_q, k, v, stage=stage_id, out=out)
    torch.cuda.synchronize()
    if not same(out, plain):
        yield "did not wait for its own stream's producer"


@case
def cuda_graph(stage_id, args):
    for problem in SMALL:
        q, k, v = random_inputs(problem)
        module, compiled, tensors = prepare(q, k, v, causal=problem.causal, stage=stage_id)
        module.run_kernel(compiled, tensors)  # loads the module, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module.run_kernel(compiled, tensors)
        for seed in (1, 2):
            for x, new in zip((q, k, v), random_inputs(problem, seed=seed)):
                x.copy_(new)
            tensors.o.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            if not same(tensors.o, attention(q, k, v, causal=problem.causal, stage=stage_id)):
                yield f"{problem}: a replay with new data differs from eager"


@case
def repeats(stage_id, args):
    for problem in (p.with_(seqlen_q=1025, seqlen_kv=1025) for p in SMALL):
        q, k, v = random_inputs(problem)
        first = run_poisoned(stage_id, q, k, v, problem.causal)
        module, compiled, tensors = prepare(q, k, v, causal=problem.causal, stage=stage_id)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(args.repeats):
            tensors.o.fill_(math.nan)
            module.run_kernel(compiled, tensors)
            differing += (tensors.o.view(torch.int16) != first[0].view(torch.int16)).any().long()
            differing += (tensors.lse != first[1]).any().long()
        if differing.item():
            yield f"{problem}: {differing.item()} of {args.repeats} repeats differ"


@case
def beside_memory_traffic(stage_id, args):
    """Loads that arrive late and in another order must neither hang the kernel nor change its output."""
    for problem in (p.with_(seqlen_q=1025, seqlen_kv=1025) for p in SMALL):
        q, k, v = random_inputs(problem)
        first = run_poisoned(stage_id, q, k, v, problem.causal)
        module, compiled, tensors = prepare(q, k, v, causal=problem.causal, stage=stage_id)
        source = torch.empty(2**28, dtype=torch.int8, device="cuda")
        traffic, other = torch.cuda.Stream(), torch.empty_like(source)
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(traffic):
                other.copy_(source, non_blocking=True)
            tensors.o.fill_(math.nan)
            for _ in range(5):
                module.run_kernel(compiled, tensors)
            if not same(tensors.o, first[0]):
                yield f"{problem}: differs beside memory traffic"
                break
        torch.cuda.synchronize()


@case
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
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "ref_check.py", stage_id]
        command = [*command, "--one-launch"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=repository())
        if run.returncode or "ERROR SUMMARY: 0 errors" not in run.stdout:
            yield f"{tool}: " + (run.stdout + run.stderr)[-1500:]


def one_launch(stage_id: str) -> int:
    for causal in (False, True):
        q, k, v = random_inputs(Problem.square(1, 2, 113, 128, causal))
        attention(q, k, v, causal=causal, stage=stage_id)
    torch.cuda.synchronize()
    return 0


# ---- running them ------------------------------------------------------------------------------------------


def run_model(stage_id: str) -> list[str]:
    """The stage's NumPy model in float64 against the reference: what can be checked without a GPU."""
    stage, _ = kernels.load(stage_id)
    by_name = models.MODELS if stage.direction == "fwd" else models.BACKWARD_MODELS
    model, failures = by_name[stage.model], []
    for n in (1, 3, 64, 65, 203, 512):
        for d in HEAD_DIMS:
            for causal in (False, True):
                problem = Problem.square(1, 1, n, d, causal, direction=stage.direction)
                q, k, v, *do = (x.double() for x in random_inputs(problem, "cpu", seed=n))
                expected = ref_check.Expected(q, k, v, causal, *do)
                inputs, exact = (q, k, v), expected.forward
                if do:
                    inputs, exact = (q, k, v, *expected.forward, *do), expected.gradients
                found = model(*(x[0, 0].numpy() for x in inputs), causal=causal)
                off = max(abs(x - ref[0, 0].numpy()).max() for x, ref in zip(found, exact))
                if not off <= 1e-12:
                    failures.append(
                        f"n{n} d{d} causal={causal}: {stage.model} is {off:.3g} away from the reference"
                    )
    return failures


def run_stages(names: list[str], args: object) -> int:
    """Run every case for the stages named (or `all`); prints as it goes and returns how many cases failed."""
    stage_ids = list(kernels.LADDER) if names == ["all"] else names
    try:
        for stage_id in stage_ids:
            kernels.load(stage_id)
    except ValueError as error:
        print(f"ref_check.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    on_gpu = hopper_gpu()
    failed = 0
    for stage_id in stage_ids:
        if not on_gpu:
            failures = run_model(stage_id)
            verdict = "fails" if failures else "passes"
            print(f"{stage_id}: no Hopper GPU, no kernel was executed; its model {verdict}")
            print("".join(f"    {line}\n" for line in failures), end="")
            failed += bool(failures)
            continue
        if args.one_launch:
            failed += one_launch(stage_id)
            continue
        worst_seen.clear()
        for name, function in CASES.items():
            if args.only and args.only not in name:
                continue
            begin = time.perf_counter()
            try:
                failures = list(function(stage_id, args))
            except Exception as error:  # a case that breaks is a case that fails; the others still run
                failures = [f"{type(error).__name__}: {error}"]
            verdict = "FAIL" if failures else "pass"
            print(f"{stage_id}  {verdict}  {name}  ({time.perf_counter() - begin:.1f} s)", flush=True)
            for line in failures[:5]:
                print(f"    {line}", flush=True)
            failed += bool(failures)
        seen = ", ".join(f"{name} {value:.3g}" for name, value in worst_seen.items())
        print(f"{stage_id}: worst seen: {seen}", flush=True)
    return failed
