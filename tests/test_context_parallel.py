"""Context parallelism without a GPU: the schedule, and the ring over gloo with the reference's formulas for
kernels (`ring_worker.py`)."""

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import hopper_attention
from harness import context_model
from harness import context_parallel as measuring
from hopper_attention import ops, tuned
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.integrations import copy_engines
from hopper_attention.integrations.context_parallel import Rows
from hopper_attention.kernels.contract import Problem

REPO = Path(__file__).resolve().parents[1]
RANKS = (1, 2, 3, 4, 7, 8, 16)
SCHEDULES = {
    "forward": cp.schedule,
    "backward": lambda *a: cp.backward_schedule(*a, tail=False),
    "backward, tail": lambda *a: cp.backward_schedule(*a, tail=True),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


# ---- the schedule -----------------------------------------------------------------------------------------


def tiles_of(step: cp.Step, rank: int, ranks: int, per_chunk: int) -> list[tuple[int, int]]:
    """The (query, key) tiles of the whole sequence that a step computes, a chunk being so many tiles, of a
    causal one those with a score that is seen."""
    places = lambda who, rows: [
        cp.chunks_of(who, ranks)[half] * per_chunk + i for half in rows.halves for i in range(per_chunk)
    ]
    queries, keys = places(rank, step.queries), places(step.source, step.keys)
    return [
        (query, key)
        for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys))
        if not step.causal or j <= i
    ]


@every_schedule
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_each_block_once(ranks: int, causal: bool, schedule) -> None:
    """Over all ranks every tile that the mask leaves is computed once, and no other."""
    tiles = Counter(
        tile for rank in range(ranks) for step in schedule(rank, ranks, causal)
        for tile in tiles_of(step, rank, ranks, 2)
    )  # fmt: skip
    n = 4 * ranks
    assert tiles == Counter((i, j) for i in range(n) for j in range(n) if j <= i or not causal)


@every_schedule
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_as_much(ranks: int, causal: bool, schedule) -> None:
    """In each step that has messages, and in all, ranks have the same number of tiles."""
    of_rank = [
        [len(tiles_of(step, rank, ranks, 4)) for step in schedule(rank, ranks, causal)]
        for rank in range(ranks)
    ]
    assert all(of_steps == of_rank[0] for of_steps in of_rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_step_is_of_the_rank_so_far_before(ranks: int) -> None:
    """What the transfers assume of both schedules: in step i rank r reads from r − i."""
    for rank, causal, schedule in itertools.product(range(ranks), (True, False), SCHEDULES.values()):
        for i, step in enumerate(schedule(rank, ranks, causal)[:ranks]):
            assert step.source == (rank - i) % ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tail", [True, False])
def test_terms_of_sums(ranks: int, causal: bool, tail: bool) -> None:
    """As many as the steps of all ranks that give some."""
    for rank in range(ranks):
        mine = cp.backward_schedule(rank, ranks, causal, tail)
        dq, dk, dv = cp._terms(mine, rank, ranks, causal)
        everyone = [x for r in range(ranks) for x in cp.backward_schedule(r, ranks, causal, tail)]
        for half in Rows.BOTH.halves:
            assert dq[half] == sum(half in x.queries.halves for x in mine)
            assert dk[half] == dv[half] == sum(half in x.keys.halves for x in everyone if x.source == rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_make_the_sequence(ranks: int) -> None:
    x = torch.arange(2 * 3 * 4 * ranks).view(2, 3, 4 * ranks)
    parts = [cp.shard(x, rank, ranks) for rank in range(ranks)]
    assert torch.equal(cp.unshard(parts), x)
    assert torch.equal(parts[0][..., :2], x[..., :2])
    assert torch.equal(parts[0][..., 2:], x[..., -2:])


def test_a_sequence_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="its length must be a multiple of 8, not 12"):
        cp.shard(torch.zeros(1, 1, 12, 64), 0, 4)


# ---- sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 2, 3, 5])
def test_a_sum_is_rounded_once(terms: int) -> None:
    """Terms that are each lost beside the first, were they added in 16 bits."""
    of = lambda x: torch.full((1, 4), x).bfloat16()
    parts, target = [of(256.0)] + [of(0.75)] * (terms - 1), of(torch.nan)
    sums = cp.SummedRows(target, terms)
    for part in parts[:-1]:
        sums.add(part)
    for (_, heads), more in zip(cp.heads_in_parts(8, 4, 2), (True, False)):
        sums.add(parts[-1][:, heads], heads, more) if terms > 1 else None
    if terms == 1:
        sums.add(parts[0])
    assert torch.equal(target, of(256 + 0.75 * (terms - 1)))
    assert all(torch.equal(part, part[:, :1].expand(1, 4)) for part in parts)


def test_heads_in_parts() -> None:
    assert cp.heads_in_parts(32, 8, 2) == [(slice(0, 16), slice(0, 4)), (slice(16, 32), slice(4, 8))]
    assert cp.heads_in_parts(6, 3, 2) == cp.heads_in_parts(6, 3, 1) == [(slice(0, 6), slice(0, 3))]


# ---- over gloo --------------------------------------------------------------------------------------------


def ring(ranks: int, case: str, tmp_path: Path, timeout: float = 60.0) -> list[subprocess.CompletedProcess]:
    """Every rank's process, which `case` is run in."""
    worker, store = REPO / "tests" / "ring_worker.py", tmp_path / "store"
    env = os.environ | {"RING_TIMEOUT": str(timeout), "OMP_NUM_THREADS": "1"}
    command = lambda rank: [sys.executable, str(worker), str(rank), str(ranks), str(store), case]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    running = [subprocess.Popen(command(rank), **pipes) for rank in range(ranks)]
    try:
        outputs = [x.communicate(timeout=300) for x in running]
    finally:
        for x in running:
            x.kill()
    return [subprocess.CompletedProcess(x.args, x.returncode, *out) for x, out in zip(running, outputs)]


def passed(done: list[subprocess.CompletedProcess]) -> None:
    assert not any(x.returncode for x in done), "\n".join(x.stderr[-2000:] for x in done)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_numbers(ranks: int, kv_heads: int, causal: bool, tmp_path: Path) -> None:
    """o, lse and the gradients of both against one process' float64 attention of the whole sequence."""
    passed(ring(ranks, f"numbers(rank, ranks, {causal}, {kv_heads}, None)", tmp_path))


def test_numbers_with_a_scale_on_three_ranks(tmp_path: Path) -> None:
    passed(ring(3, "numbers(rank, ranks, True, 1, 0.2, seqlen=96)", tmp_path))


def test_one_rank(tmp_path: Path) -> None:
    passed(ring(1, "numbers(rank, ranks, True, 2, None)", tmp_path))


def test_a_compiled_graph_is_whole(tmp_path: Path) -> None:
    passed(ring(2, "numbers(rank, ranks, True, 2, None, compiled=True)", tmp_path))


def test_what_pytorch_sees(tmp_path: Path) -> None:
    passed(ring(2, "seen(rank, ranks)", tmp_path))


def test_a_wrong_number_is_seen(tmp_path: Path) -> None:
    """The comparison fails where a rank computes with another's mask."""
    done = ring(2, "numbers(rank, ranks, True, 2, None, broken=True)", tmp_path)
    assert all(x.returncode for x in done)
    assert "AssertionError: o:" in done[1].stderr


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", "ranks must bring parts of one shape, type and mask, not rank 0: q (2, 4, 32, 64)"),
        ("mask", "ranks must bring parts of one shape, type and mask"),
        ("odd", "on rank 1: a rank holds two chunks of one length, and 31 tokens are not that"),
        ("dtype", "on rank 1: q must be bfloat16 or float16, not float32"),
        ("lengths", "on rank 1: q has 32 tokens and k has 30"),
    ],
)
def test_ranks_that_disagree(how: str, said: str, tmp_path: Path) -> None:
    """The same error on every rank, before a kernel runs."""
    done = ring(2, f"refused(rank, ranks, {how!r})", tmp_path)
    passed(done)
    assert done[0].stdout == done[1].stdout
    assert said in done[0].stdout


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_rank_that_dies(when: str, tmp_path: Path) -> None:
    """An error on the others within the group's timeout."""
    done = ring(2, f"dies(rank, ranks, {when!r})", tmp_path, timeout=8.0)
    assert [x.returncode for x in done] == [0, 3], done[0].stderr[-2000:]
    assert "SAID" in done[0].stdout


def channel(done: bool, waited_s: float, timeout: float = 10.0) -> copy_engines.Channel:
    event = SimpleNamespace(query=lambda: done)
    found = copy_engines.Channel(None, None, 0, 2, None, timeout)
    found.last = event, -waited_s
    return found


@pytest.mark.parametrize(
    ("done", "waited_s", "late"), [(False, 11.0, True), (True, 11.0, False), (False, 9.0, False)]
)
def test_what_is_overdue(done: bool, waited_s: float, late: bool) -> None:
    """Only what is older than the timeout, and has not come."""
    one, watch = channel(done, waited_s), copy_engines.Watch()
    watch.channels.add(one)
    assert (watch.overdue(0.0) is one) == late


def test_what_is_young_is_not_asked() -> None:
    """An event must not be asked while a CUDA graph is captured."""
    one, watch = channel(False, 1.0), copy_engines.Watch()
    one.last[0].query = lambda: pytest.fail("asked")
    watch.channels.add(one)
    assert watch.overdue(0.0) is None


def test_words_of_a_channel_are_apart() -> None:
    """Each has one writer, and none lies in a place."""
    for ranks in (2, 3, 8):
        handle = SimpleNamespace(buffer_ptrs=[1 << 20 * (rank + 1) for rank in range(ranks)])
        one = copy_engines.Channel(None, handle, 256, ranks, None, 1.0)
        words = [
            one.word(0, what, place, writer)
            for what in (copy_engines.FREE, copy_engines.THERE) for place in (0, 1) for writer in range(ranks)
        ]  # fmt: skip
        assert len(set(words)) == len(words)
        assert max(words) + 4 <= handle.buffer_ptrs[0] + copy_engines.Channel.header(ranks)


# ---- the call ---------------------------------------------------------------------------------------------


def test_it_is_public() -> None:
    assert hopper_attention.context_parallel_attention is cp.context_parallel_attention
    assert "context_parallel_attention" in hopper_attention.__all__


def test_without_a_group() -> None:
    q = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="call init_process_group first"):
        hopper_attention.context_parallel_attention(q, q, q)


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor"):
        hopper_attention.context_parallel_attention(torch.zeros(1), None, None)


def test_margin() -> None:
    with tuned.leaving(8):
        assert tuned.margin.get() == 8
    assert tuned.margin.get() == 0
    for wrong in (-1, 132, 1.0, True):
        with pytest.raises(ValueError, match="sm_margin must be a number of SMs"), tuned.leaving(wrong):
            pass


def test_shapes_for_tracing() -> None:
    q, k = torch.empty(2, 4, 6, 64, device="meta"), torch.empty(2, 2, 6, 64, device="meta")
    o, lse = cp.fake_forward(q, k, k, "group")
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [x.shape for x in cp.fake_backward(o, q, k, k, o, lse, None, "group")] == [
        q.shape,
        k.shape,
        k.shape,
    ]
    assert str(cp.context_forward._schema).count("SymInt") == 0
    assert torch.Tag.pt2_compliant_tag in ops.TAGS


# ---- the bench and its model ------------------------------------------------------------------------------


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: it would be measured")
    assert bench.main(["context_parallel"]) == 0
    assert "1024 GPUs" in capsys.readouterr().out
    assert bench.main(["context_parallel", "k6"]) == bench.main(["context_parallel", "--save"]) == 2


RATES = context_model.Rates(650e12, 550e12)


@pytest.mark.parametrize("both", [False, True])
def test_the_model_of_the_time(both: bool) -> None:
    """One GPU has no messages; a network without limits costs nothing; a slow one costs its bytes."""
    predict = lambda ranks, network: context_model.predict(
        16384, 32, 8, 128, ranks, RATES, network, both, hosts_of=1024
    )
    free = context_model.Network("free", 1e30, 0.0)
    assert predict(1, context_model.NDR).efficiency == predict(8, free).efficiency == 1.0
    slow = context_model.Network("slow", 1e9, 0.0)
    kv = 2 * 8 * 16384 * 128 * 2 / 1e9  # seconds
    # K and V there, again for the backward pass, and dK and dV, twice as large, home.
    messages = 7 * kv * (1 + 3 * both)
    assert messages - 2 * kv <= predict(8, slow).seconds <= messages + predict(8, free).seconds
    whole = Problem.square(1, 32, 8 * 16384, 128, True).flops / 8
    assert predict(8, free).compute >= whole / RATES.forward


@pytest.mark.parametrize("ranks", RANKS)
def test_the_models_steps_are_equal(ranks: int) -> None:
    assert context_model.steps_are_equal(ranks)


def test_a_second_host_costs() -> None:
    """From there on the slower network is what a step waits for, and more hosts change little."""
    of = lambda ranks: (
        context_model.predict(8192, 32, 8, 128, ranks, RATES, context_model.NVLINK, True).efficiency
    )
    assert of(1) == 1.0 and of(16) < of(8) < 1.0
    assert of(1024) == pytest.approx(of(64), abs=0.01)


def test_overlap() -> None:
    of = lambda ms, iqr=0.0: {"ms": ms, "ms_iqr": iqr}
    assert measuring.overlap({"compute": of(4.0), "messages": of(1.0), "ours": of(4.1)}) == pytest.approx(0.9)
    assert measuring.overlap({"compute": of(4.0, 0.3), "messages": of(1.0), "ours": of(4.1, 0.3)}) is None


def test_what_is_left_out_for_a_part_of_the_time() -> None:
    """A ring without messages or without kernels takes the same steps."""
    calls: list[str] = []
    kernels = measuring.Uncomputed().kernels()

    class Four(measuring.Unsent):
        def __init__(self) -> None:
            self.rank, self.ranks, self.there = 1, 4, {}

        def post(self, kind, *rest):
            calls.append(kind)
            return super().post(kind, *rest)

    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64)
    o, lse = cp.ring_forward(q, k, k, Four(), None, True, kernels)
    assert calls == ["keys"] * 3
    found = cp.ring_backward(q, q, k, k, o, lse, None, Four(), None, True, False, kernels)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert Counter(calls) == {"keys": 6, "gradients": 4}  # of two key heads, one by one in the last step
