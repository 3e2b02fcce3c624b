"""What a measuring run may not do: lose rows that are there, give a wrong output a time, pass on what an
earlier call left in memory."""

import json
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_up_results import ENVIRONMENT as OF_STAGES
from made_up_results import make_row
from test_decoding import on_cpu, stand_in  # noqa: F401  a fixture
from test_library_results import suite_on_a_gpu  # noqa: F401  a fixture

import bench
from harness import (
    context_parallel,
    decoding_timing,
    logits,
    measuring,
    policy_suite,
    quantizing,
    results,
    row_files,
    suite,
    timing,
)
from harness import decoding as decoding_on_gpu
from harness import inputs as inputs_of_stages
from harness.command import Usage
from harness.decoding_cases import Case, Row
from hopper_attention import decoding
from hopper_attention.kernels.contract import Problem

ENVIRONMENT = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "cutlass_dsl": "4", "peers": {}}


# ---- rows that are there ----------------------------------------------------------------------------------


def test_two_runs_that_save_at_once_keep_each_others_rows(tmp_path: Path) -> None:
    path, start = tmp_path / "k2.json", threading.Barrier(2)

    def save(head_dim: int) -> None:
        saved = measuring.Saved("k2", path, dict(OF_STAGES))
        start.wait()
        for batch in range(1, 21):
            saved.add([make_row("k2", 8.0, Problem.square(batch, 2, 64, head_dim, False))])

    runs = [threading.Thread(target=save, args=(d,)) for d in (64, 128)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(results.load(path).rows) == 40


def test_a_peer_that_fails_takes_no_time_away(
    suite_on_a_gpu: list[Problem],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_64 = lambda problem: problem.head_dim == 64
    assert suite.run("models", ["k6"], tmp_path, ["cudnn", "fa3"], of_64)
    (path,) = tmp_path.rglob("*.json")
    before, measure = path.read_bytes(), suite.measure
    without = lambda problem, names: measure(problem, [x for x in names if x != "fa3"])
    monkeypatch.setattr(suite, "measure", without)
    assert not suite.run("models", ["k6"], tmp_path, ["cudnn", "fa3"], of_64)
    assert path.read_bytes() == before
    assert "the row that is there stays: it has a time of fa3" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"environment": 1, "rows": []}'])
def test_a_file_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = row_files.path_of(tmp_path, "models_fwd", ENVIRONMENT, "library")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(Usage, match=r"models_fwd\.json is no file of rows"):
        row_files.refuse("models_fwd", ENVIRONMENT, tmp_path)


def test_a_folder_that_is_none_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Usage, match="file"):
        row_files.refuse("models_fwd", ENVIRONMENT, tmp_path / "file")


@pytest.fixture
def timed_decode(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`bench.py decode` as if there were a GPU; a row from `fails_at` on ends the run."""
    state = SimpleNamespace(fails_at=10**9, us=1.0)

    def time_row(row: Row, pool: object) -> dict[str, object]:
        state.fails_at -= 1
        if state.fails_at < 0:
            raise torch.OutOfMemoryError("no room")
        return {"us": {"hopper_attention": state.us, "cudnn": 2.0}}

    record = SimpleNamespace(save=lambda path: path)
    for name, what in {
        "ahead": list,
        "Pool": lambda: None,
        "judge_all": lambda console: (True, {}),
        "stress": lambda row, pool: True,
        "waits_for_the_launch_before": lambda pool: True,
        "drops_wrong_guesses": lambda pool: True,
        "time_row": time_row,
        "versions": dict,
        "line_of": lambda *given: "",
    }.items():
        monkeypatch.setattr(decoding_on_gpu, name, what)
    monkeypatch.setattr(decoding_on_gpu.decoding_records, "record_of", lambda environment: record)
    monkeypatch.setattr(timing, "environment", lambda peers: ENVIRONMENT)
    return state


def test_a_run_of_decode_that_ends_early_leaves_the_file(
    timed_decode: SimpleNamespace, tmp_path: Path
) -> None:
    assert decoding_on_gpu.run(tmp_path)
    path = tmp_path / "h200" / "decode" / "bench.json"
    before = path.read_bytes()
    assert len(json.loads(before)["rows"]) == len(decoding_on_gpu.ROWS)
    timed_decode.us, timed_decode.fails_at = 3.0, 3
    with pytest.raises(torch.OutOfMemoryError):
        decoding_on_gpu.run(tmp_path)
    assert path.read_bytes() == before


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What processes on two GPUs would write."""
    state = SimpleNamespace(passed=True, measured=[])

    def spawn(options: dict[str, object]) -> None:
        state.measured = [*options["judged"], *options["sizes"]]
        checks = {"forward": {"passed": state.passed}}
        rows = [{"size": vars(size), "checks": checks} for size in state.measured]
        Path(options["save"]).write_text(json.dumps({"environment": ENVIRONMENT | {"gpus": 2}, "rows": rows}))

    monkeypatch.setattr(context_parallel, "spawn", spawn)
    monkeypatch.setattr(context_parallel, "environment", lambda ranks: ENVIRONMENT | {"gpus": ranks})
    return state


def test_a_failed_check_of_the_ring_is_neither_written_nor_success(
    two_gpus: SimpleNamespace, tmp_path: Path
) -> None:
    assert context_parallel.run(tmp_path)
    path = tmp_path / "h200" / "context_parallel" / "bench.json"
    before, every = path.read_bytes(), len(two_gpus.measured)
    assert every == len(json.loads(before)["rows"]) > 3
    two_gpus.passed = False
    for save in (None, tmp_path):
        assert not context_parallel.run(save)
    assert path.read_bytes() == before
    two_gpus.passed = True
    assert context_parallel.run(tmp_path, context_parallel.SIZES[0].tokens)
    assert len(two_gpus.measured) < every == len(json.loads(path.read_bytes())["rows"])
    with pytest.raises(Usage, match="no size of 77 tokens"):
        context_parallel.run(tmp_path, 77)


@pytest.mark.parametrize("option", [["--head-dim", "64"], ["--causal", "1"], ["--peers", "fa3"]])
@pytest.mark.parametrize("stage_id", ["decode", "context_parallel"])
def test_what_would_be_ignored_is_refused(
    stage_id: str, option: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert bench.main([stage_id, *option]) == 2
    assert f"it takes no {option[0]}" in capsys.readouterr().err


# ---- outputs that are wrong -------------------------------------------------------------------------------


class Recycled:
    """A call of whose outputs' memory the lowest free block is given out again, as an allocator does; from
    launch `writes` on it writes nothing."""

    def __init__(self, writes: int):
        self.blocks, self.given, self.writes = torch.zeros(4, 2), [lambda: None] * 4, writes

    def __call__(self) -> torch.Tensor:
        free = next(i for i, holder in enumerate(self.given) if holder() is None)
        found = self.blocks[free]
        self.given[free] = weakref.ref(found)
        self.writes -= 1
        return found.fill_(1.0) if self.writes >= 0 else found


@pytest.mark.parametrize("before", [0, 1, 2])
def test_what_an_earlier_call_left_is_not_what_a_call_returns(before: int) -> None:
    call = Recycled(before + 2)
    for _ in range(before):
        call()
    assert inputs_of_stages.returned_to_poisoned_memory(call).isnan().all()
    assert inputs_of_stages.returned_to_poisoned_memory(Recycled(3)).equal(torch.ones(2))


class One:
    """In place of `suite._One`: a call, the ways, and who judges, wrong from the n-th time on."""

    backward, q, k, v, do = False, None, None, None, ()

    def __init__(self, wrong_from: int = 10**9, off: float = 0.0):
        self.left, self.off = wrong_from, off

    def call(self) -> tuple[torch.Tensor, ...]:
        return torch.ones(2), torch.ones(2)

    def way(self, choice: object):
        return lambda: (torch.ones(2) + self.off, torch.ones(2))

    def judge(self, found: object, stage_id: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("wrong")


@pytest.mark.parametrize(
    ("one", "said"),
    [(One(), None), (One(0), "wrong"), (One(1), "wrong"), (One(off=0.1), "does not agree with the call")],
)
def test_a_suite_judges_before_and_behind_and_every_way(
    one: One, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.square(1, 2, 64, 64, False)
    monkeypatch.setattr(suite, "_One", lambda problem: one)
    monkeypatch.setattr(suite, "chosen_stage", lambda problem: "k6")
    made_up = lambda calls, seconds: dict.fromkeys(calls, timing.Timing(0.1, 0.0, None, None))
    monkeypatch.setattr(timing, "interleaved", made_up)
    if said is None:
        assert "attention" in suite.measure(problem, [])
        return
    with pytest.raises(RuntimeError, match=said):
        suite.measure(problem, [])


@pytest.mark.parametrize("right", [0, 1])
def test_a_suite_of_policies_judges_before_and_behind(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [right]

    def judge() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("wrong")

    monkeypatch.setattr(
        policy_suite, "_Ours", lambda problem: SimpleNamespace(judge=judge, call=None, given=None)
    )
    monkeypatch.setattr(policy_suite, "Rows", lambda given: None)
    monkeypatch.setattr(timing, "interleaved", lambda calls, seconds: {})
    with pytest.raises(RuntimeError, match="wrong"):
        policy_suite.measure(Problem.square(1, 2, 64, 64, False), [])


def test_decode_is_judged_by_the_bits_of_two_runs_and_by_its_caches(
    on_cpu: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case((4, 70), 1, 4, appends=1)
    assert decoding_on_gpu.judge(case, "cpu")[0] is None
    calls = []

    def another_bit(*given: object, **options: object):
        o, lse = stand_in(*given, **options)
        calls.append(o)
        return o + 2.0**-6 * (len(calls) == 2), lse

    monkeypatch.setattr(decoding, "decode", another_bit)
    assert decoding_on_gpu.judge(case, "cpu")[0] == "two runs differ"

    def elsewhere(q, k_cache, v_cache, *rest: object, **options: object):
        found = stand_in(q, k_cache, v_cache, *rest, **options)
        v_cache[0, -1] = 7.0
        return found

    monkeypatch.setattr(decoding, "decode", elsewhere)
    assert decoding_on_gpu.judge(case, "cpu")[0] == "v_cache is not what it should be"


ROWS = [
    Row(2, 4, 2, 1, 300), Row(2, 4, 2, 3, 300), Row(2, 4, 2, 1, 300, page=64),
    Row(3, 4, 2, 2, 300, ragged=True),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_formula_that_rows_of_decode_are_held_to(row: Row) -> None:
    """Of pages what their table says, for queries that a causal mask hides keys from."""
    torch.manual_seed(0)
    pages = -(-row.keys // (row.page or row.keys))
    shape = row.batch, pages * (row.page or row.keys), row.kv_heads, row.head_dim
    q = torch.randn(row.batch, row.queries, row.heads, row.head_dim).bfloat16()
    k, v = (torch.randn(shape).bfloat16() for _ in range(2))
    row_of_pages = row if not row.page else Row(**vars(row) | {"keys": shape[1]})
    found = decoding_timing.plain(row_of_pages, q, k, v)
    if row.page:
        table, ((k, v),) = decoding_timing.in_pages(row_of_pages, [(k, v)])
        k, v = (torch.stack([x[own].flatten(0, 1) for own in table]) for x in (k, v))
    for b, length in enumerate(row_of_pages.lengths):
        case = Case((length,), row.queries, row.heads // row.kv_heads, row.kv_heads, row.head_dim)
        exact, _ = decoding_on_gpu.expected(case, *(x[b : b + 1].double() for x in (q, k, v)))
        assert (found[b] - exact[0]).abs().max() < 1e-5


@pytest.mark.parametrize("wrong_from", [0, 4])
def test_a_row_of_decode_that_is_wrong_has_no_time(wrong_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the timing or behind it; a peer that is wrong has no time alone."""
    row, left = Row(2, 4, 2, 1, 300), [wrong_from]
    monkeypatch.setattr(decoding_timing, "SHORT", 100)
    made = lambda row: [torch.ones(row.batch, row.keys, 2, 128).bfloat16() for _ in range(2)]
    pool = SimpleNamespace(caches=lambda row: [made(row)])

    def ours(row: Row, q: torch.Tensor, caches: list):
        left[0] -= 1
        right = decoding_timing.plain(row, q, *caches[0])
        return [lambda: right if left[0] >= 0 else right + 1.0]

    def theirs(row: Row, q: torch.Tensor, caches: list):
        return [lambda: decoding_timing.plain(row, q, *caches[0]) + 1.0]

    monkeypatch.setattr(decoding_timing, "ours", ours)
    monkeypatch.setattr(decoding_timing, "PROVIDERS", {"fa3": theirs})
    monkeypatch.setattr(decoding_timing.decoding_records, "identity_of", lambda row: "")
    for name in ("plain_launches", "reads"):
        monkeypatch.setattr(decoding_timing, name, lambda *given: [])
    monkeypatch.setattr(decoding_timing, "captured", lambda calls: calls)
    monkeypatch.setattr(decoding_timing, "in_turns", lambda graphs: dict.fromkeys(graphs, 1.0))
    monkeypatch.setattr(decoding_timing, "single", lambda calls: 1.0)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: randn(*shape).bfloat16())
    if wrong_from:
        left[0] = 10**9
        found = decoding_timing.time_row(row, pool)
        assert "fa3" not in found["us"] and "off by" in found["errors"]["fa3"]
        left[0] = 2
    with pytest.raises(RuntimeError, match="off by"):
        decoding_timing.time_row(row, pool)


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_codes_and_logits_are_neither_written_nor_success(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    monkeypatch.setattr(row_files, "save", lambda name, *given: saved.append(name))
    monkeypatch.setattr(timing, "environment", lambda peers: ENVIRONMENT)
    monkeypatch.setattr(quantizing, "hopper_gpu", lambda: True)
    monkeypatch.setattr(quantizing, "check", lambda: ["a code is wrong"] * wrong)
    monkeypatch.setattr(quantizing, "times", lambda head_dim: [])
    assert quantizing.command(["--save", str(tmp_path)]) == (not wrong)
    measured = {"model": "BERT", "way": "in one pass", "positions": 4, "sure": 3, "same": 3 - wrong}
    measured |= dict.fromkeys(("our_error", "sdpa_error", "our_mean_error", "sdpa_mean_error"), 0.1)
    monkeypatch.setattr(logits, "saving", lambda *given: True)
    monkeypatch.setattr(logits, "measure", lambda name: [measured])
    assert logits.measured([]) == (not wrong)
    assert saved == ["quantizing", "logits"] * (not wrong)
