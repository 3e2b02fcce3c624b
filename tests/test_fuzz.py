"""The random problems: what their numbers give, and that a wrong library is found out. On a CPU the models
stand in for the kernels."""

import json
import math
from collections.abc import Iterator

import pytest
import torch

from harness import fuzz, policy_models
from harness.policies import Given
from harness.results import repository
from hopper_attention import few_queries, launch, policies, tuned
from hopper_attention.kernels import ladder

# Problems that the choice of tiles, edited since the committed run, sends to kernels that it did not run.
CHOSEN_SINCE = {(fuzz.FEW, number) for number in (808, 949, 978, 1887, 2041)}
# And those that they alone ran.
NEEDED_BEFORE = {
    ("k6_slices_r64", f"b1 h1 n1 d64 causal {kind}", '{"rows": 64}')
    for kind in ("float16", "bfloat16 scaled")
}


def test_a_number_is_a_problem() -> None:
    for direction in ("fwd", "bwd"):
        for number in range(200):
            drawn = fuzz.problem_of(number, direction)
            assert drawn == fuzz.problem_of(number, direction) or math.isnan(drawn.outside)
            problem = drawn.problem
            assert problem.policies and problem.direction == direction
            assert problem.heads * problem.seqlen_q * problem.batch <= 20 * fuzz.ROWS_MAX
            stage_id = launch.FORWARD if direction == "fwd" else launch.BACKWARD
            assert ladder.load(stage_id)[1].supports(problem) is None, problem


def test_few_queries_go_every_way() -> None:
    """Most kernels of decode that a forward problem reaches, and all the other ways."""
    drawn = [fuzz.problem_of(number, fuzz.FEW) for number in range(fuzz.COUNT)]
    assert drawn[7] == fuzz.problem_of(7, fuzz.FEW) or math.isnan(drawn[7].outside)
    assert all(x.which == fuzz.FEW for x in drawn)
    for problem in (x.problem for x in drawn):
        assert 0 < problem.seqlen_q < problem.seqlen_kv
        assert problem.batch == 1 or problem.batch * problem.heads * problem.seqlen_kv <= fuzz.KEYS_MAX
    jobs = fuzz.jobs(drawn)
    decoded = {repr((what, options)) for stage_id, what, options in jobs if stage_id == launch.DECODE}
    assert decoded < {repr(kernel) for kernel in few_queries.kernels()} and len(decoded) >= 49  # of 72
    assert decoded >= {repr((x, y)) for x, y in few_queries.kernels() if x.head_dim < 256 and y["rows"] <= 32}
    assert {stage_id for stage_id, *_ in jobs} >= {"k6_slices_r64", "k6_r64", launch.DECODE}
    assert {(x.layout, x.problem.scaled) for x in drawn} == {(x, y) for x in fuzz.LAYOUTS for y in (0, 1)}


def test_short_sequences_are_a_tile_of_keys_each() -> None:
    """Most through bwd4_one, which the call is told that it may run, and some with too many blind queries."""
    drawn = [fuzz.problem_of(number, fuzz.SHORT) for number in range(300)]
    assert drawn[7] == fuzz.problem_of(7, fuzz.SHORT) or math.isnan(drawn[7].outside)
    for one in drawn:
        problem, stage_id = one.problem, fuzz.stage_of(one)
        assert one.which == fuzz.SHORT and problem.policies == ("sequences",)
        assert 0 < fuzz.longest_of(one) == max(n for _, n in problem.sequences) <= 128
        assert ladder.load(stage_id)[1].supports(problem) is None, problem
    stages = [fuzz.stage_of(x) for x in drawn]
    assert len(drawn) > stages.count(launch.ONE_TILE) > 250
    assert len({(x.problem.head_dim, x.problem.causal, x.problem.lse_grad) for x in drawn}) == 8
    assert sum(any(not n for _, n in x.problem.sequences) for x in drawn) > 50


def test_a_backward_call_is_told_of_keys_every_other_time() -> None:
    drawn = [fuzz.problem_of(number, "bwd") for number in range(4 * fuzz.KINDS)]
    packed = [x for x in drawn if x.problem.sequences]
    told = [x for x in packed if fuzz.longest_of(x)]
    assert 0.4 * len(packed) < len(told) < 0.6 * len(packed)
    assert all(fuzz.longest_of(x) == max(n for _, n in x.problem.sequences) for x in told)


def test_every_policy_is_among_the_kinds() -> None:
    kinds = fuzz.kinds()
    for field, values in {
        "head_dim": (64, 128, 256),
        "dtype": ("bfloat16", "float16"),
        "mask": ("full", "causal", "top left", "window"),
        **dict.fromkeys(("softcap", "sink", "packed", "lse_grad"), (False, True)),
    }.items():
        assert {getattr(kind, field) for kind in kinds} == {*values}
    together = {(kind.mask, kind.softcap, kind.sink, kind.packed) for kind in kinds}
    assert len(together) >= 22


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """A library that computes by the models; `wrong` says what is wrong with it."""
    wrong: dict[str, str | None] = {"wrong": None}
    seen: list[Given] = []
    make = fuzz.random_given

    def on_cpu(problem, seed, **options) -> Given:
        seen.append(make(problem, seed, device="cpu", **options))
        return seen[-1]

    def rows(given: Given, name: str, x: torch.Tensor) -> torch.Tensor:
        if given.problem.sequences is None or name == "dsink":
            return x
        return x[0] if name == "lse" else x[0].transpose(0, 1)

    def call(*inputs, **options):
        found = policy_models.outputs(seen[-1], wrong["wrong"])
        found = tuple(rows(seen[-1], name, x) for name, x in found.items())
        return found if len(found) != 3 else (*found, None)

    def attention(*tensors, return_lse=False, **options):
        o, lse = call()[:2]
        o = o + (wrong["wrong"] == "one row" and not return_lse)
        return (o, lse) if return_lse else o

    monkeypatch.setattr(fuzz, "attention", attention)
    monkeypatch.setattr(fuzz, "random_given", on_cpu)
    monkeypatch.setattr(policies, "forward", call)
    monkeypatch.setattr(policies, "backward", call)
    monkeypatch.setattr(fuzz, "ROWS_MAX", 500)
    yield wrong


def test_a_right_library_passes_and_a_wrong_one_does_not(stand_ins: dict[str, str | None]) -> None:
    for direction, wrong in (("fwd", "left edge a key short"), ("bwd", "slope of the cap left out")):
        stand_ins["wrong"] = None
        found = list(fuzz.run(0, 12, (direction,)))
        assert [(x.number, failures) for x, failures in found if failures] == []
        stand_ins["wrong"] = wrong
        failed = [x.number for x, failures in fuzz.run(0, 12, (direction,)) if failures]
        applies = [x.number for x, _ in found if policy_models.applies(wrong, x.problem)]
        assert failed and set(failed) <= set(applies)


def test_few_queries_are_judged(stand_ins: dict[str, str | None]) -> None:
    cost = lambda x: x.batch * x.heads * x.seqlen_q * x.seqlen_kv
    drawn = [fuzz.problem_of(number, fuzz.FEW) for number in range(400)]
    small = [x for x in drawn if cost(x.problem) < 3e5][:8]
    assert len(small) == 8 and [fuzz.check(x) for x in small] == [[]] * 8
    stand_ins["wrong"] = "one row"
    assert all(fuzz.check(x) == ["without the lse o is another"] for x in small)


def test_what_is_written_down() -> None:
    drawn = [fuzz.problem_of(number, "fwd") for number in range(100)]
    row = fuzz.summary("fwd", drawn, 0)
    assert row["problems"] == 100 and sum(row["layouts"].values()) == 100
    assert min(row[x] for x in ("windows", "softcaps", "sinks", "packed", "grouped_heads")) > 10


def test_the_committed_run_is_of_these_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers still give what was tried, and every kernel that it ran has its identity in the file."""
    rows = json.loads((repository() / "results/h200/library/fuzz.json").read_text("utf-8"))["rows"]
    monkeypatch.setattr(tuned, "gpu", lambda device=None: tuned.H200)
    summaries = [row for row in rows if "direction" in row]
    kernels = rows[len(summaries) :]
    ran = {(x["stage"], x["kernel"], json.dumps(x["options"])) for x in kernels}
    assert len(ran) == len(kernels) and all(len(x["cubin_sha256"]) == 64 for x in kernels)
    of_jobs = lambda drawn: {(stage_id, str(what), json.dumps(x)) for stage_id, what, x in fuzz.jobs(drawn)}
    needed = set()
    assert [row["direction"] for row in summaries] == [*fuzz.SETS]
    for row in summaries:
        direction = row["direction"]
        drawn = [fuzz.problem_of(number, direction) for number in range(fuzz.COUNT)]
        assert row == fuzz.summary(direction, drawn, 0)
        elsewhere = [x for x in drawn if (direction, x.number) in CHOSEN_SINCE]
        assert not any(of_jobs([x]) <= ran for x in elsewhere), "take it out of CHOSEN_SINCE"
        needed |= of_jobs(x for x in drawn if x not in elsewhere)
    assert needed.isdisjoint(NEEDED_BEFORE) and needed | NEEDED_BEFORE == ran


def test_whatever_is_drawn_is_on_the_list_of_what_can_be_reached() -> None:
    """So `precompile policies` has it."""
    from hopper_attention.precompile import jobs_of

    listed = jobs_of("policies")
    assert len({(stage_id, what) for stage_id, what, _ in listed}) == len(listed)
    every = {(stage_id, what) for stage_id, what, _ in listed}
    for direction in ("fwd", "bwd"):
        drawn = [fuzz.problem_of(number, direction) for number in range(300)]
        needed = {(stage_id, what) for stage_id, what, _ in fuzz.jobs(drawn) if what.policies}
        assert needed and needed <= every


def test_a_device_whose_kernels_have_no_policies_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert fuzz.main(["0", "1", "--no-save"]) == 2
        assert "there is no Hopper GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["0", "5"], ["--set", "few"], ["1", "20"], ["--no-save"], []])
def test_only_a_whole_run_replaces_what_is_committed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "COUNT", 20)
    saved = []
    monkeypatch.setattr(fuzz, "hopper_gpu", lambda: True)
    monkeypatch.setattr(fuzz, "jobs", lambda drawn: [])
    monkeypatch.setattr(fuzz, "fill", lambda jobs: None)
    monkeypatch.setattr(fuzz.timing, "environment", lambda peers: {})
    monkeypatch.setattr(fuzz.row_files, "save", lambda *what: saved.append(what))
    passing = lambda first, count, sets, processes: (
        (fuzz.problem_of(n, x), []) for x in sets for n in range(first, first + count)
    )
    monkeypatch.setattr(fuzz, "run_in_processes", passing)
    assert fuzz.main(arguments) == 0
    assert len(saved) == (not arguments)
