"""Context parallelism without a GPU: the schedule, and the ring over gloo with the reference's formulas for
kernels (`ring_worker.py`)."""

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import hopper_attention
from harness import context_model, machine_code
from hopper_attention import launch, ops, tuned
from hopper_attention.integrations import block_gradients, merging, packed_ring, zigzag
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.integrations.zigzag import Rows
from hopper_attention.kernels.contract import Problem

REPO = Path(__file__).resolve().parents[1]
RANKS = (1, 2, 3, 4, 7, 8, 16)


# ---- the schedule -----------------------------------------------------------------------------------------


def tiles_of(step: zigzag.Step, rank: int, ranks: int, per_chunk: int) -> list[tuple[int, int]]:
    """The (query, key) tiles of the whole sequence that a step computes, a chunk being so many tiles, of a
    causal one those with a score that is seen."""
    places = lambda who, rows: [
        zigzag.chunks_of(who, ranks)[half] * per_chunk + i for half in rows.halves for i in range(per_chunk)
    ]
    queries, keys = places(rank, step.queries), places(step.source, step.keys)
    return [
        (query, key)
        for (i, query), (j, key) in itertools.product(enumerate(queries), enumerate(keys))
        if not step.causal or j <= i
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_each_block_once(ranks: int, causal: bool) -> None:
    """Over all ranks every tile that the mask leaves is computed once, and no other."""
    tiles = Counter(
        tile for rank in range(ranks) for step in zigzag.schedule(rank, ranks, causal)
        for tile in tiles_of(step, rank, ranks, 2)
    )  # fmt: skip
    n = 4 * ranks
    assert tiles == Counter((i, j) for i in range(n) for j in range(n) if j <= i or not causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_as_much(ranks: int, causal: bool) -> None:
    """In each step that has messages, and in all, ranks have the same number of tiles."""
    of_rank = [
        [len(tiles_of(step, rank, ranks, 4)) for step in zigzag.schedule(rank, ranks, causal)]
        for rank in range(ranks)
    ]
    assert all(of_steps == of_rank[0] for of_steps in of_rank)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_step_is_of_the_rank_so_far_before(ranks: int) -> None:
    """What the transfers assume of both schedules: in step i rank r reads from r − i."""
    for rank, causal in itertools.product(range(ranks), (True, False)):
        turns = zigzag.backward_schedule(rank, ranks, causal, 8, 3)
        assert [turn.step for turn in turns[:ranks]] == zigzag.schedule(rank, ranks, causal)
        for i, turn in enumerate(turns):
            assert turn.step.source == (rank - i) % ranks


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("ranks", RANKS)
def test_each_head_of_a_step_once(ranks: int, kv_heads: int) -> None:
    """A rank's own block is first and last, some of its heads before messages, or all."""
    for first in {1, kv_heads // 2 or 1, kv_heads}:
        turns = zigzag.backward_schedule(0, ranks, True, kv_heads, first)
        heads: dict[zigzag.Step, list[int]] = {step: [] for step in zigzag.schedule(0, ranks, True)}
        for step, of_step in turns:
            heads[step] += range(kv_heads)[of_step]
        assert all(found == list(range(kv_heads)) for found in heads.values())
        together = ranks == 1 or kv_heads == first
        assert len(turns) == ranks + (not together)
        assert together or turns[0].heads.stop == first


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "first"),
    [
        (16384, 32, 8, 4),
        (4096, 32, 32, 11),
        (4096, 32, 8, 4),
        (8192, 32, 32, 16),
        (256, 8, 1, 1),
        (256, 3, 3, 1),
    ],
)
def test_how_many_heads_come_first(tokens: int, heads: int, kv_heads: int, first: int) -> None:
    """Half, or a third where the messages of a GPU on NVLink take more than half of the block's kernels."""
    assert zigzag.first_heads(kv_heads, tokens * heads // kv_heads) == first
    flops = 2.5 * Problem(1, heads, kv_heads, tokens, tokens, 128, True).flops
    message = 2 * kv_heads * tokens * 128 * 4 / context_model.NVLINK.bytes_per_s
    long = message > 0.5 * flops / 650e12
    assert first == math.ceil(kv_heads / (3 if long else 2))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("causal", [True, False])
def test_arrivals(ranks: int, causal: bool) -> None:
    """As many as the steps of all other ranks that give some."""
    for rank in range(ranks):
        everyone = [x for r in range(ranks) if r != rank for x in zigzag.schedule(r, ranks, causal)]
        of = lambda half: sum(half in x.keys.halves for x in everyone if x.source == rank)
        assert zigzag.arrivals(rank, ranks, causal) == {half: of(half) for half in Rows.BOTH.halves}


def test_rows_of_an_odd_length() -> None:
    x = torch.arange(5)
    assert torch.equal(Rows.BOTH.of(x, 0), x)
    assert [Rows.of(half, x[:4], 0).tolist() for half in Rows.BOTH.halves] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("ranks", RANKS)
def test_shards_make_the_sequence(ranks: int) -> None:
    x = torch.arange(2 * 3 * 4 * ranks).view(2, 3, 4 * ranks)
    parts = [zigzag.shard(x, rank, ranks) for rank in range(ranks)]
    assert torch.equal(zigzag.unshard(parts), x)
    assert torch.equal(parts[0][..., :2], x[..., :2])
    assert torch.equal(parts[0][..., 2:], x[..., -2:])


def test_a_sequence_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="its length must be a multiple of 8, not 12"):
        zigzag.shard(torch.zeros(1, 1, 12, 64), 0, 4)


# ---- sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("terms", [1, 2, 3, 5])
def test_a_sum_is_rounded_once(terms: int, lent: bool) -> None:
    """Terms that are each lost beside the first, were they added in 16 bits; what is lent stays."""
    of = lambda x: torch.full((1, 4), x)
    parts, target = [of(256.0)] + [of(0.75)] * (terms - 1), of(torch.nan).bfloat16()
    total = block_gradients.Sum(target, terms)
    for part in parts:
        total.add(part.bfloat16(), lent)
    assert torch.equal(target, of(256 + 0.75 * (terms - 1)).bfloat16())
    kept = of(1.0)
    total = block_gradients.Sum(target, 3)
    for part in (kept, of(2.0), of(3.0)):
        total.add(part, lent)
    assert torch.equal(target, of(6.0).bfloat16()) and torch.equal(kept, of(1.0)) == lent


@pytest.mark.parametrize(
    ("head_dim", "batch", "deterministic", "wanted"),
    [
        (64, 1, False, "Sums"),
        (128, 2, False, "Sums"),
        (128, 1, True, "OneByOne"),
        (256, 1, False, "OneByOne"),
        (96, 1, False, "OneByOne"),
        (64, 32767, False, "Sums"),
        (64, 32768, False, "OneByOne"),
    ],
)
def test_what_adds(head_dim, batch, deterministic, wanted, monkeypatch) -> None:
    for name in ("Sums", "OneByOne"):
        monkeypatch.setattr(block_gradients, name, lambda *_, name=name: name)
    x = torch.empty(batch, 2, 4, head_dim, device="meta")
    inputs = block_gradients.Inputs(x, x, x, x, x, x[..., 0], deterministic=deterministic)
    assert block_gradients.gradients_of(inputs, [], {}) == wanted


@pytest.mark.parametrize("what", block_gradients.reachable(), ids=str)
def test_its_kernels_compile(what) -> None:
    """Each that a backward pass can launch; none spills, but what spills in bwd4_parts too: six words of a
    masked block at head_dim 64 that is given its scale."""
    _, problem, options = what
    code = machine_code.disassemble(launch.kernel_for(*what).__cubin__)
    spills = problem.head_dim == 64 and problem.scaled and problem.causal and options["piece"] == "block"
    assert sum(kernel.frame_bytes for kernel in code) <= (24 if spills else 0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", [(False, False), (False, True), (True, True), (True, False)], ids=str)
def test_the_merge_compiles(head_dim: int, dtype: str, wide: tuple[bool, bool]) -> None:
    least = Problem.square(1, 1, 1, head_dim, False, dtype=dtype)
    assert launch.kernel_for(merging.FILE, least, dict(zip(("wide_in", "wide_out"), wide))).__cubin__


@pytest.mark.parametrize(("head_dim", "waits"), [(8, False), (80, True), (128, False), (192, True)])
def test_a_rows_lse_is_read_before_it_is_written(head_dim: int, waits: bool) -> None:
    """Where the threads of a row lie in two warps, all of a CTA wait between."""
    least = Problem.square(1, 1, 1, head_dim, False)
    kernel = launch.kernel_for(merging.FILE, least, {"wide_in": False, "wide_out": False})
    (code,) = machine_code.disassemble(kernel.__cubin__)
    assert any(x.opcode.startswith("BAR.SYNC") for x in code.instructions) == waits


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_numbers(ranks: int, tmp_path: Path) -> None:
    """o, lse and the gradients of both against one process' float64 attention of the whole sequence: of
    chunks that are whole tiles and others, of one batch with a rank's own heads first and last, of more, and
    with an operator for each block."""
    whole, other = f"seqlen={256 * ranks}, wants_dlse=False", f"seqlen={16 * ranks}"
    cases = [
        f"{call}(rank, ranks, {causal}, {kv_heads}, {scale}, {lengths}, batch={batch})"
        for call, causal, kv_heads, scale, lengths, batch in (
            ("numbers", True, 4, None, whole, 1),
            ("numbers", True, 2, None, whole, 2),
            ("numbers", False, 4, 0.2, whole, 1),
            ("numbers", False, 4, 0.1, f"{whole}, head_dim=128", 1),
            ("numbers", True, 2, 0.1, f"{other}, head_dim=128", 1),
            ("numbers", True, 2, None, other, 1),
            ("numbers", False, 1, None, other, 2),
            ("one_by_one", True, 4, None, other, 1),
            ("one_by_one", False, 2, 0.2, other, 2),
        )
    ]
    passed(ring(ranks, f"[{', '.join(cases)}]", tmp_path))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_packed_sequences(ranks: int, tmp_path: Path) -> None:
    """As `test_numbers`, of sequences that each are cut for themselves, one of them empty."""
    cases = [
        "packed(rank, ranks, True, 2)",
        "packed(rank, ranks, False, 1, 0.2)",
        "packed(rank, ranks, True, 4)",
    ]
    passed(ring(ranks, f"[{', '.join(cases)}]", tmp_path))


def test_where_packed_chunks_lie() -> None:
    """Each row once; the first chunks of all sequences, then the second ones."""
    for lengths, ranks in (((8, 4, 12), 1), ((16, 0, 8), 2), ((12,), 3), ((24, 48), 4)):
        bounds = [0, *itertools.accumulate(lengths)]
        cu = torch.tensor(bounds, dtype=torch.int32)
        everyone = [packed_ring.places(cu, rank, ranks) for rank in range(ranks)]
        assert sorted(torch.cat(everyone).tolist()) == list(range(bounds[-1]))
        for rank, rows in enumerate(everyone):
            packing = packed_ring.Packing(cu, len(rows), ranks)
            halves = packing.halves(rows)
            chunk = lambda i: [
                begin + i * ((end - begin) // (2 * ranks)) + x
                for begin, end in itertools.pairwise(bounds) for x in range((end - begin) // (2 * ranks))
            ]  # fmt: skip
            assert halves.tolist() == [x for i in zigzag.chunks_of(rank, ranks) for x in chunk(i)]
            assert torch.equal(packing.order(halves), rows)


@pytest.mark.parametrize("lengths", [(8, 4, 12), (16, 0, 8), (4,), (0,), ()])
@pytest.mark.parametrize("padding", [2, 10])
def test_rows_behind_the_last_sequence(lengths: tuple[int, ...], padding: int) -> None:
    """Each row once, and those of the sequences in each half as if there were no others."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    count = int(cu[-1])
    own, padded = (packed_ring.Packing(cu, n) for n in (count, count + padding))
    rows = torch.arange(count + padding)
    first, second = padded.halves(rows).chunk(2)
    assert torch.equal(padded.order(padded.halves(rows)), rows)
    found = torch.cat((first[: count // 2], second[: count // 2]))
    assert torch.equal(found, own.halves(rows[:count]))


@pytest.mark.parametrize("case", ["numbers(rank, ranks, True, 2, None", "packed(rank, ranks, True, 2"])
def test_a_compiled_graph_is_whole(case: str, tmp_path: Path) -> None:
    passed(ring(2, f"{case}, compiled=True)", tmp_path))


def test_what_pytorch_sees(tmp_path: Path) -> None:
    passed(ring(2, "seen(rank, ranks)", tmp_path))


@pytest.mark.parametrize("causal", [True, False])
def test_all_gather_gives_the_same(causal: bool, tmp_path: Path) -> None:
    passed(ring(2, f"gathered(rank, ranks, {causal}, 2)", tmp_path))


def test_training_on_two_ranks(tmp_path: Path) -> None:
    """FSDP2, recomputed layers: the same losses as on one rank."""
    passed(ring(2, "trains(rank, ranks)", tmp_path))


def test_a_wrong_number_is_seen(tmp_path: Path) -> None:
    """The comparison fails where a rank computes with another's mask."""
    done = ring(2, "numbers(rank, ranks, True, 2, None, broken=True)", tmp_path)
    assert all(x.returncode for x in done)
    assert "AssertionError: o:" in done[1].stderr


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", "one shape and type with the same options, not rank 0: q (2, 4, 32, 64)"),
        ("mask", "causal False"),
        ("determinism", "deterministic True"),
        ("margin", "on rank 1: sm_margin must be a number of SMs, from 0 to 130, not -1"),
        ("odd", "on rank 1: a rank holds two chunks of one length, and 31 tokens are not that"),
        ("dtype", "on rank 1: q must be bfloat16 or float16, not float32"),
        ("lengths", "on rank 1: q has 32 tokens and k has 30"),
        ("packed", "on rank 1: packed sequences, (total, heads, head_dim), come with their cu_seqlens"),
        ("lengths of others", "torch.bfloat16, cu_seqlens (3,) torch.int32"),
        ("lengths of 64 bits", "on rank 0: cu_seqlens_q must be int32, not int64"),
        ("values", "on rank 1: takes values of head_dim 64, not of 32"),
        ("layout", "on rank 1: q has stride 65: strides must be multiples of 8 elements"),
        ("head_dim", "on rank 0: takes head_dim in multiples of 8 up to 256, not 63"),
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
