"""Check, time, check again: one row for each stage and peer on a problem, and the file it is kept in.

A stage is judged before it is timed, and once more afterwards: outputs and scratch are filled with NaN and
the very call that was timed is made again. What fails either has no time. Rows join their file problem by
problem, so that what was measured survives whatever comes later.
"""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from harness import edits, judging, machine_code, peers, reference, results, timing
from harness.inputs import poison, random_inputs, returned_to_poisoned_memory
from harness.stages import check_memory
from hopper_attention import attention, attention_backward, selection, tuned, ways
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import KernelFile, Problem, Tensors
from hopper_attention.launch import (
    DECODE,
    LIBRARY,
    Kernel,
    compile_kernel,
    compiled_for,
    kernel_for,
    sms_option,
)
from hopper_attention.precompile import Job
from hopper_attention.ways import Kind, Way

# From this length on, and for who is this fast, the power cap and not the burst is what a user sees.
SUSTAINED_FROM, SUSTAINED_TFLOPS = 16384, 100.0


@dataclass(frozen=True)
class Contender:
    """A kernel file with options, under the name its rows carry: a stage, the library's call of it, or a
    variant."""

    name: str
    stage_id: str
    options: dict[str, Any] = field(hash=False)
    lacks: str | None = None  # one of the file's ideas: `edits.LACKING`

    @classmethod
    def stage(cls, stage_id: str) -> "Contender":
        options = ladder.load(stage_id)[0].options
        return cls(stage_id, stage_id, options | (sms_option(tuned.gpu().sms) if stage_id in LIBRARY else {}))

    @classmethod
    def public_call(cls, stage_id: str) -> "Contender":
        return replace(cls.stage(stage_id), name=results.PUBLIC_CALLS[stage_id])

    def problem_of(self, problem: Problem) -> Problem | None:
        """What it computes of a problem, or None. FP8 that is given 16 bits is given what a forward stage
        is."""
        direction = ladder.load(self.stage_id)[0].direction
        given = {problem.direction, *(["fwd"] if problem.direction == "fp8_cast" else [])}
        return problem.with_(direction=direction) if direction in given else None

    @property
    def is_public_call(self) -> bool:
        return self.name == results.PUBLIC_CALLS.get(self.stage_id)

    def kernels(self, problem: Problem) -> tuple[str, dict[str, Any]]:
        """The stage whose kernels run, and its options: of a public call those that the library chooses."""
        if not self.is_public_call:
            return self.stage_id, self.options
        stage_id = chosen_stage(problem, self.options.get("deterministic", False))
        return stage_id, library_options(stage_id)

    @property
    def file(self) -> KernelFile:
        if self.lacks is not None:
            return cast(KernelFile, edits.lacking(ladder.FILES[self.stage_id], self.lacks))
        return ladder.load(self.stage_id)[1]

    def compile(self, problem: Problem) -> Kernel:
        stage_id, options = self.kernels(problem)
        if self.is_public_call:
            return kernel_for(*job_of(stage_id, problem))
        if self.lacks is None:
            return compile_kernel(stage_id, problem, **options)
        least = compiled_for(stage_id, problem)
        return edits.compile_lacking(ladder.FILES[stage_id], self.lacks, least, **options)

    @property
    def is_variant(self) -> bool:
        return self.name != self.stage_id and not self.is_public_call


def chosen_stage(problem: Problem, deterministic: bool = False, longest: int = 0) -> str:
    """The stage that the library runs for a problem, of several launches the first one's; `longest` is what
    it is told of packed sequences: how many queries one has at most, in the backward pass how many keys."""
    if problem.direction == "fwd":
        gpu, sequences = tuned.gpu(), problem.sequences or ()
        known = ways.known_of(problem.seqlen_q, len(sequences), longest)
        return selection.forward_stage(problem, ways.way_of(problem, *gpu, known), gpu)
    short = selection.are_short(longest)
    return next(selection.backward_launches(problem, deterministic, gpu=tuned.gpu(), short=short)).stage_id


def library_options(stage_id: str) -> dict[str, Any]:
    """With which the library compiles a stage for this GPU."""
    return selection.options_of(stage_id, tuned.gpu())


def job_of(stage_id: str, problem: Problem) -> Job:
    """A stage's kernel for a problem, as the library compiles it."""
    if stage_id == DECODE:
        return selection.forward_kernel(problem, Way(0, Kind.DECODE), tuned.gpu())
    return stage_id, compiled_for(stage_id, problem), library_options(stage_id)


class PublicCall:
    """Stands where a stage's kernel file does: runs its kernel through the library, which allocates."""

    def __init__(self, contender: Contender, problem: Problem):
        self.options = {"causal": problem.causal, "top_left": problem.top_left}
        if problem.direction == "bwd":
            self.options["deterministic"] = contender.options.get("deterministic", False)

    def run_kernel(self, compiled: object, t: Tensors) -> None:
        if t.do is None:
            t.o, t.lse = attention(t.q, t.k, t.v, **self.options, return_lse=True)
        else:
            inputs = t.do, t.q, t.k, t.v, t.o, t.lse
            t.dq, t.dk, t.dv = attention_backward(*inputs, **self.options)


def stages_for(problem: Problem, stage_ids: list[str]) -> list[str]:
    """Those of the stages that compute the problem's direction."""
    return [stage_id for stage_id in stage_ids if ladder.load(stage_id)[0].direction == problem.direction]


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    """ "OOM: …" with what the GPU would have had to hold, as far as the allocator's message tells."""
    gib = [float(x) for x in re.findall(r"(\d+\.\d+) GiB", str(error))]  # asked, capacity, free, ...
    if len(gib) < 3:
        return "OOM: " + str(error).partition(". ")[0]
    asked, capacity, free = gib[:3]
    return f"OOM: needs at least {capacity - free + asked:.1f} GiB, the GPU has {capacity:.1f}"


def ready(contender: Contender, expected: judging.Expected, problem: Problem) -> tuple:
    """(kernel file, compiled, tensors) of a contender, for what `expected` says it reads. Raises MemoryError
    where its scratch does not fit."""
    file = contender.file
    check_memory(contender.stage_id, problem, expected.q.device)
    compiled = contender.compile(problem)
    tensors = expected.allocate(file, problem, **contender.options)
    return PublicCall(contender, problem) if contender.is_public_call else file, compiled, tensors


def host_microseconds(contender: Contender, problem: Problem) -> float:
    """Host time of one call, on a problem so small that the GPU is done before the host."""
    problem = problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=64, seqlen_kv=64)
    q, k, v, *do = random_inputs(problem)
    small = judging.Expected(q, k, v, problem.causal, *do)
    file, compiled, tensors = ready(contender, small, problem)
    return timing.host_microseconds(lambda: file.run_kernel(compiled, tensors))


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yields a function that says how much device memory was held at most, beyond what was before."""
    gc.collect()  # what is freed inside would be missing from the peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield lambda: peak
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before


@dataclass
class Bench:
    """Contenders beside peers, problem by problem, in one environment.

    With `check_all` every row is judged before and after it is timed, else the first of each kernel compiled.
    """

    contenders: list[Contender]
    peers: list[str]
    check_all: bool
    environment: dict[str, Any]
    checked: set[tuple] = field(default_factory=set)
    sustains: bool = True  # whether long problems are also run for seconds

    def measure(self, problem: Problem) -> list[results.Row]:
        """One row per peer, and per contender of the problem's direction, timed in one interleaved run."""
        return list(_One(self, problem).rows())


class _One:
    """One problem of a `Bench`."""

    def __init__(self, bench: Bench, problem: Problem):
        self.bench, self.problem = bench, problem
        self.inputs = random_inputs(problem)
        q, k, v, *do = self.inputs
        self.expected = judging.Expected(q, k, v, problem.causal, *do)
        self.expected.inputs  # noqa: B018  of a backward problem O and LSE are among them: now, and not counted
        self.calls: dict[str, Callable[[], object]] = {}
        self.judges: dict[str, Callable[[], judging.Verdict]] = {}
        self.known: dict[str, dict[str, Any]] = {}  # of a row, before its time

    def rows(self) -> Iterator[results.Row]:
        # PyTorch's math path also materialises S. It goes first and alone, so that no stage's scratch is what
        # it lacks.
        if "math" in self.bench.peers:
            yield from self.prepare_peer("math")
            yield from self.timed()
        for contender in self.bench.contenders:
            if contender.problem_of(self.problem) is not None:
                yield from self.prepare(contender)
        for name in self.bench.peers:
            if name != "math":
                yield from self.prepare_peer(name)
        yield from self.timed()

    def prepare_peer(self, name: str) -> Iterator[results.Row]:
        """Build a peer's call and run it once, so that one that cannot run does not stop the others."""
        try:
            with peak_memory() as peak:
                call = peers.PEERS[name].build(self.problem, *self.inputs)
                call()
            held = {} if self.problem.in_fp8 else {"peak_bytes": peak()}
            self.calls[name], self.known[name] = call, held
        except torch.OutOfMemoryError as error:
            yield results.Row.on(self.problem, name, error=out_of_memory(error))
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            yield results.Row.on(self.problem, name, error=f"unsupported: {reason:.100}")

    def prepare(self, contender: Contender) -> Iterator[results.Row]:
        """Compile, allocate and judge a contender; a row only if it will have no time."""
        bench, problem, name = self.bench, self.problem, contender.name
        own = contender.problem_of(problem)
        try:
            with peak_memory() as peak:
                file, compiled, tensors = ready(contender, self.expected, own)
        except (MemoryError, torch.OutOfMemoryError) as error:
            text = f"OOM: {error}" if isinstance(error, MemoryError) else out_of_memory(error)
            yield results.Row.on(problem, name, error=text)
            return
        call = lambda: file.run_kernel(compiled, tensors)
        stage_id, options = contender.kernels(own)
        rounding = reference.rounding_of(*ladder.load(stage_id), own, **options)

        def judge() -> judging.Verdict:
            if contender.is_public_call:  # which allocates: what it will be given is poisoned
                returned_to_poisoned_memory(lambda: (call(), *tensors.outputs.values()))
            else:
                poison(tensors)
                call()
            return self.expected.judge(tensors.outputs, rounding)

        known = {"cubin_sha256": machine_code.identity(compiled)}
        if not isinstance(file, PublicCall) and not problem.in_fp8:  # whose codes may be made here too
            known["peak_bytes"] = peak()  # outputs and scratch: a stage's `run_kernel` allocates nothing
        kernel = (name, problem.head_dim, problem.causal, problem.dtype, problem.top_left)
        if bench.check_all or kernel not in bench.checked:
            verdict = judge()
            if not verdict.passed:
                yield self.failed(name, verdict)
                return
            bench.checked.add(kernel)
            self.judges[name] = judge
            known |= {"check": "pass", "max_error": verdict.max_error}
        if not contender.is_variant and name not in bench.environment["host_us"]:
            bench.environment["host_us"][name] = round(host_microseconds(contender, own), 2)
        self.calls[name], self.known[name] = call, known

    def failed(self, name: str, verdict: judging.Verdict, when: str = "") -> results.Row:
        return results.Row.on(self.problem, name, check="fail", error=when + "; ".join(verdict.failures))

    def timed(self) -> Iterator[results.Row]:
        """Rows of the calls prepared so far, which take turns; who was judged before is judged again."""
        try:
            times = timing.interleaved(self.calls)
        except torch.OutOfMemoryError as error:
            for name in self.calls:
                yield results.Row.on(self.problem, name, error=out_of_memory(error))
            times = {}
        steady = {}
        if self.bench.sustains and self.problem.seqlen_q >= SUSTAINED_FROM:
            ms = {name: time.ms_median for name, time in times.items()}
            fast = {x: ms[x] for x in ms if self.problem.flops / ms[x] / 1e9 >= SUSTAINED_TFLOPS}
            steady = timing.sustained({x: self.calls[x] for x in fast}, fast)
        for name, time in times.items():
            known = self.known.get(name, {})
            if name in self.judges:
                verdict = self.judges[name]()
                if not verdict.passed:
                    yield self.failed(name, verdict, "after the timing: ")
                    continue
                known["max_error"] = max(known["max_error"], verdict.max_error)
            yield results.Row.timed(self.problem, name, time, steady.get(name), **known)
        # What a judge closes over holds this object and every tensor of its stage: a cycle, and gigabytes.
        for held in (self.calls, self.judges, self.known):
            held.clear()
        torch.cuda.empty_cache()


class Saved:
    """The file of a stage's rows, which grows problem by problem."""

    def __init__(self, stage: str, path: Path, environment: dict[str, Any]):
        """Raises ValueError or OSError when rows of this environment could not be kept there: it says so now,
        not after they were measured."""
        self.stage, self.path, self.environment = stage, path, environment
        self._joined([])
        results.probe(path)

    def add(self, rows: list[results.Row], **environment: Any) -> dict[Problem, str]:
        """Merge rows into the file; those of a failed check are left out. Returns problems whose rows stay as
        they are, by the fastest peer, which these rows lack."""
        self.environment |= environment
        with results.alone_with(self.path):
            joined, stay = self._joined([row for row in rows if row.check != "fail"])
            joined.save(self.path)
        return stay

    def _joined(self, rows: list[results.Row]) -> tuple[results.Results, dict[Problem, str]]:
        """The file with these rows, and what `add` returns."""
        new = results.Results(self.stage, self.environment, rows)
        if not self.path.exists():
            return new, {}
        old = results.load(self.path)
        return results.merge(old, new), results.lacks_fastest(old, new)
