"""The machine code that attention to a cache can run: the closed list, and the record of what has passed."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rotating import sample

from harness import decoding, provenance, records
from harness import decoding_records as own
from harness.decoding_cases import ROWS, Case, cases, kernel_of
from hopper_attention import decoding as library
from hopper_attention import precompile, tuned
from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import DECODE, reachable_in_decode

ENVIRONMENT = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "cutlass_dsl": "4"}
LISTED = {own.key_of(problem, options) for _, problem, options in reachable_in_decode()}


def made_up(**changes: object) -> own.Record:
    wanted = own.wanted().values()
    kernels = tuple(own.Passed(problem, options, "a" * 64, n) for problem, options, n in wanted)
    return replace(own.Record(ENVIRONMENT, provenance.digest(DECODE), kernels), **changes)


# What is committed


def test_the_kernels_have_a_record_of_todays_sources() -> None:
    found = own.committed()
    assert found, "decode has passed on no GPU"
    assert [own.stale(record) for record in found] == [None] * len(found)


def test_a_sample_of_the_record_is_of_todays_machine_code() -> None:
    every = [(record, x) for record in own.committed() for x in record.kernels]
    for record, kernel in sample(every, 1):
        assert own.changed(record, (kernel,)) == []


def test_what_was_timed_is_what_passed() -> None:
    """On a GPU that has a record: rows of an earlier build have none."""
    for record in own.committed():
        path = record.path.parents[1] / "decode" / "bench.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        passed = {x.key: x.cubin_sha256 for x in record.kernels}
        assert [x["cubin_sha256"] for x in rows] == [passed[own.key_of(*kernel_of(row))] for row in ROWS]


# The closed list


def test_what_can_be_reached() -> None:
    assert len(LISTED) == len(reachable_in_decode()) == 5280
    assert {own.key_of(*kernel_of(x)) for x in (*cases(), *ROWS)} <= LISTED
    assert {own.key_of(*kernel_of(x)) for x in ROWS} <= set(own.wanted())


def asked_for(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object]) -> str:
    """The kernel that a call asks for."""
    found = []

    class Asked(Exception):
        pass

    def ask(stage_id: str, least: Problem, options: dict[str, object]) -> None:
        found.append((stage_id, own.key_of(least, options)))
        raise Asked

    monkeypatch.setattr(library, "kernel_for", ask)
    monkeypatch.setattr(library, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(library.tuned, "gpu", lambda device: tuned.H200)
    with pytest.raises(Asked):
        decoding.flash_attn_with_kvcache(**arguments)
    assert found[-1][0] == DECODE
    return found[-1][1]


def test_a_case_runs_the_kernel_that_its_record_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in list(cases())[::7]:
        arguments, *_ = decoding.inputs_of(case, "cpu")
        assert asked_for(monkeypatch, arguments) == own.key_of(*kernel_of(case))


def test_nothing_else_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call asks for is on the list."""
    chance = random.Random(1)
    for _ in range(150):
        kv_heads, group = chance.choice((1, 2, 3)), chance.choice((1, 3, 8, 20))
        page = chance.choice((0, 0, 16, 32, 64, 128, 384))
        case = Case(
            tuple(chance.randint(1, 70) for _ in range(chance.randint(1, 3))),
            *(chance.choice((1, 2, 17)), group, kv_heads),
            *(chance.choice((64, 128, 256)), chance.choice(("bfloat16", "float16"))),
            page=page,
            eight_bits=chance.random() < 0.5,
            causal=chance.random() < 0.5,
            left=chance.choice((-1, 0, 30)),
            appends=chance.choice((0, 0, 1, 3)),
            invariant=chance.random() < 0.3,
        )
        arguments, *_ = decoding.inputs_of(case, "cpu")
        if not page and not case.appends and chance.random() < 0.5:
            arguments.pop("cache_seqlens")
        if page and case.head_dim == 64 and not calls_decode.takes_pages(page, 64, case.eight_bits):
            continue
        assert asked_for(monkeypatch, arguments) in LISTED


def test_precompile_narrows_decode_to_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[precompile.Job] = []
    monkeypatch.setattr(precompile, "fill", lambda found, workers: jobs.extend(found) or len(jobs))
    narrow = ["--head-dim", "128", "--dtype", "bfloat16", "--page-size"]
    for page, boxes in (("0", {0}), ("16", {16}), ("256", {64, 128})):
        jobs.clear()
        assert precompile.main(["decode", *narrow, page, "--sms", "114"]) == 0
        assert {x.options["box"] for x in map(Named, jobs)} == boxes
        assert {(x.problem.head_dim, x.problem.dtype, x.options["sms"]) for x in map(Named, jobs)} == {
            (128, "bfloat16", 114)
        }
    jobs.clear()
    assert precompile.main(["decode", "--sms", "132"]) == 0
    assert len(jobs) == 5280 and all("sms" not in options for _, _, options in jobs)


class Named:
    def __init__(self, job: precompile.Job):
        self.stage_id, self.problem, self.options = job


# A record that lacks something, or is of other sources


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = made_up()
    path = record.save(tmp_path / "decode.json")
    assert own.load(path) == record
    assert own.stale(record) is None
    assert "its sources or compiler" in own.stale(made_up(digest="b" * 64))


def test_records_that_lack_something_are_neither_written_nor_read(tmp_path: Path) -> None:
    whole = made_up()
    path = whole.save(tmp_path / "decode.json")
    fewer = replace(whole.kernels[0], cases=whole.kernels[0].cases - 1)
    count = whole.kernels[0].cases
    lacking = (
        (f"{count} cases of ", replace(whole, kernels=whole.kernels[1:])),
        (f"{count} cases of ", replace(whole, kernels=(fewer, *whole.kernels[1:]))),
        ("the environment's driver", replace(whole, environment={**ENVIRONMENT, "driver": None})),
    )
    for words, record in lacking:
        with pytest.raises(ValueError, match=f"the record of decode lacks {words}"):
            record.save(tmp_path / "decode.json")
    assert own.load(path) == whole
    for text in ("[]", "{", '{"schema": 7}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"decode\.json: "):
            own.load(path)


def test_another_machine_code_is_named() -> None:
    """Not a record of today's: the hash is made up."""
    record = made_up()
    [line] = own.changed(record, record.kernels[:1])
    assert "aaaaaaaaaaaa passed, the source compiles to" in line


def test_the_ladders_records_leave_decodes_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "h200" / "checks").mkdir(parents=True)
    for module in (records, own):
        monkeypatch.setattr(module, "results_dir", lambda: tmp_path)
    assert own.report(renew=False) == ["decode: no record; `bench.py decode --save` on a GPU makes one"]
    made_up(digest="b" * 64).save(tmp_path / "h200" / "checks" / "decode.json")
    assert set(records.committed()) == set(records.ladder.CHECKED)
    [line] = own.report(renew=False)
    assert line.startswith("decode: its sources or compiler are not those of its record on NVIDIA H200")
