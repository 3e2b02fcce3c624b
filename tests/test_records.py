"""Every kernel that a user can reach has passed on a GPU: the committed records, and what makes one stale."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rotating import sample

from harness import case_list, cases, policy_cases, provenance, records
from hopper_attention import cache
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import (
    WITH_POLICIES,
    compiled_for,
    has_height,
    reachable,
    reachable_with_policies,
)

STAGES = list(ladder.CHECKED)
SAMPLE = 1  # kernels beside the plain ones that a run of the tests recompiles
ENVIRONMENT = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "cutlass_dsl": "4"}


def made_up(stage_id: str, **changes: object) -> records.Record:
    plain = [
        records.Checked(kernel, "a" * 64, forms=tuple(cases.forms_of(stage_id, kernel)))
        for kernel in reachable(stage_id)
    ]
    others = [
        records.Checked(kernel, "a" * 64, problems=count)
        for kernel, count in records.with_policies(stage_id).items()
    ]
    kernels, names = (*plain, *others), tuple(case_list.chosen(stage_id))
    record = records.Record(stage_id, ENVIRONMENT, provenance.digest(stage_id), 100, names, kernels)
    return replace(record, **changes)


# What is committed


WANTING: dict[str, str] = {}  # stages whose kernels still have to pass on a GPU, and why


@pytest.mark.parametrize("stage_id", STAGES)
def test_every_kernel_has_a_record_of_todays_sources(stage_id: str) -> None:
    found = records.committed()[stage_id]
    if stage_id in WANTING:
        assert not found, f"{stage_id} has a record now"
        pytest.xfail(WANTING[stage_id])
    assert found, f"{stage_id} has passed on no GPU"
    assert [records.stale(record) for record in found] == [None] * len(found)


def test_a_sample_of_the_records_is_of_todays_machine_code() -> None:
    """Of the plain cases tests/test_machine_code_identity.py recompiles some, of the rest this."""
    others = [
        (record, x.kernel)
        for found in records.committed().values()
        for record in found
        for x in record.kernels
        if (x.kernel.dtype, x.kernel.head_dim, x.kernel.top_left, x.kernel.scaled)
        not in (("bfloat16", d, False, False) for d in (64, 128))
    ]
    for record, kernel in sample(others, SAMPLE):
        assert records.changed(record, [kernel]) == []


# The closed list


@pytest.mark.parametrize(("stage_id", "kernels"), [("k2", 4), ("k6", 72), ("bwd3", 4), ("bwd4_parts", 126)])
def test_what_can_be_reached(stage_id: str, kernels: int) -> None:
    found = reachable(stage_id)
    assert len(found) == len(set(found)) == kernels
    for kernel in found:
        assert (
            compiled_for(stage_id, kernel.with_(batch=3, heads=2, kv_heads=2, seqlen_q=65, seqlen_kv=65))
            == kernel
        )
    forms = {name for kernel in found for name in cases.forms_of(stage_id, kernel)}
    assert forms == (set(cases.FORMS) if kernels > 4 else {"MHA", "more tiles than SMs"})


@pytest.mark.parametrize("stage_id", STAGES)
def test_nothing_else_can_be_reached(stage_id: str) -> None:
    """Whatever problem a stage takes, and the library gives it, what is compiled for it is on the list: of
    k6's heights a head_dim has some."""
    direction, chance = ladder.load(stage_id)[0].direction, random.Random(stage_id)
    supports, listed = ladder.load(stage_id)[1].supports, set(reachable(stage_id))
    taken = 0
    for _ in range(400):
        causal, scaled = chance.random() < 0.7, chance.random() < 0.3
        problem = Problem(
            *(chance.choice((1, 2, 7)), 12, chance.choice((12, 4, 1))),
            *(chance.choice((1, 64, 203)) for _ in range(2)),
            head_dim=chance.choice((32, 64, 96, 128, 192, 256)),
            value_dim=chance.choice((None, None, 40, 136)),
            causal=causal,
            dtype=chance.choice(("bfloat16", "float16")),
            direction=direction,
            top_left=causal and chance.random() < 0.5,
            scaled=scaled,
            lse_grad=scaled and direction == "bwd" and chance.random() < 0.5,
        )
        if supports(problem) is None and has_height(stage_id, problem):
            taken += 1
            assert compiled_for(stage_id, problem) in listed
    assert taken


@pytest.mark.parametrize("stage_id", WITH_POLICIES)
def test_what_a_record_lists_of_policies_is_of_every_head_dim_mask_and_policy(stage_id: str) -> None:
    listed = records.with_policies(stage_id)
    assert set(listed) <= set(reachable_with_policies(stage_id))
    head_dims = {x.head_dim for x in reachable_with_policies(stage_id)}
    two = {"k6_r128": {64, 128}, "bwd4_one": {64, 128}}
    assert head_dims == ({"k6_r192": {64}} | two).get(stage_id, {64, 128, 256})
    assert len(listed) >= (38 if len(policies_of(stage_id)) > 1 else 7) * len(head_dims) // 3
    of = {(x.head_dim, name, x.dtype) for x in listed for name in x.policies}
    assert {x[:2] for x in of} == set(itertools.product(head_dims, policies_of(stage_id)))
    in_fp16 = {x[1] for x in of if x[2] == "float16"}  # the cases have each at one head_dim: packed at 128
    assert in_fp16 == set(policies_of(stage_id)) - ({"sequences"} if stage_id == "k6_r192" else set())


def policies_of(stage_id: str) -> set[str]:
    return {name for kernel in reachable_with_policies(stage_id) for name in kernel.policies}


def test_what_all_cases_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel a line: forms of plain ones, though cases of policies ran them too, problems of the others; of
    what no call can reach nothing."""
    plain = reachable("k6")[0]
    capped, unreachable = plain.with_(softcap=1.0), plain.with_(head_dim=72)
    forms = cases.forms_of("k6", plain)
    monkeypatch.setattr(records, "_identity", lambda stage_id, kernel: "a" * 64)
    monkeypatch.setattr(cases, "forms_passed", {plain: list(forms)})
    monkeypatch.setattr(policy_cases, "problems_passed", Counter({plain: 2, capped: 3, unreachable: 1}))
    expected = [records.Checked(plain, "a" * 64, tuple(forms)), records.Checked(capped, "a" * 64, problems=3)]
    assert list(records.passed("k6")) == expected


# A record that lacks something, or is of other sources


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = made_up("k6")
    path = record.save(tmp_path / "k6.json")
    assert records.load(path) == record
    assert records.stale(record) is None


def test_records_that_lack_something_are_neither_written_nor_read(tmp_path: Path) -> None:
    whole = made_up("k6")
    path = whole.save(tmp_path / "k6.json")
    fewer_forms = replace(whole.kernels[3], forms=whole.kernels[3].forms[1:])
    without_last = replace(whole.kernels[-1], problems=whole.kernels[-1].problems - 1)
    last = whole.kernels[-1].kernel
    lacking = {
        f"{whole.kernels[-1].problems} problems of {last}": replace(
            whole, kernels=(*whole.kernels[:-1], without_last)
        ),
        f"problems of {last}": replace(whole, kernels=whole.kernels[:-1]),
        "the cases policies alone": replace(
            whole, cases=tuple(x for x in whole.cases if x != "policies alone")
        ),
        "MHA of .* d64 ": replace(whole, kernels=(*whole.kernels[:3], fewer_forms, *whole.kernels[4:])),
        "MHA of .* d192 ": replace(
            whole, kernels=tuple(x for x in whole.kernels if x.kernel.head_dim != 192)
        ),
        "the cases needle": replace(whole, cases=tuple(x for x in whole.cases if x != "needle")),
        "repeats": replace(whole, repeats=0),
        "the environment's driver": replace(whole, environment={**ENVIRONMENT, "driver": None}),
    }
    for words, record in lacking.items():
        with pytest.raises(ValueError, match=f"the record of k6 lacks .*{words}"):
            record.save(tmp_path / "k6.json")
    assert records.load(path) == whole
    data = json.loads(path.read_text())
    data["kernels"][3]["forms"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"k6\.json: lacks more tiles than SMs"):
        records.load(path)
    for text in ("[]", "{", '{"schema": 7}', '{"schema": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"k6\.json: "):
            records.load(path)


def edit(source: str, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str) -> None:
    """`kernels/` with one word of a file replaced, in place of the real one."""
    copy = tmp_path / f"kernels {len(list(tmp_path.iterdir()))}"
    for path in Path(source).rglob("*.py"):
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    monkeypatch.setattr(cache, "KERNELS", copy)


def test_the_digest_follows_what_determines_the_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, before = str(cache.KERNELS), provenance.digest("k6")
    assert provenance.digest("k2") != before != provenance.digest("bwd4")
    assert provenance.digest("bwd4") != provenance.digest("bwd4_det")  # one file, other options
    edit(source, "k6.py", monkeypatch, tmp_path, "GROWTH = 8.0", "GROWTH = 7.0")
    assert provenance.digest("k6") != before
    edit(source, "device/tma.py", monkeypatch, tmp_path, "SWIZZLE_BYTES = 1024", "SWIZZLE_BYTES = 2048")
    assert provenance.digest("k6") != before
    edit(source, "k6.py", monkeypatch, tmp_path, '"""K6: the production forward.', '"""K6: another word.')
    assert provenance.digest("k6") == before  # what is no code
    edit(source, "k2.py", monkeypatch, tmp_path, "TILE = 64", "TILE = 32")
    assert provenance.digest("k6") == before  # what it does not import
    rows = provenance.digest("k6_r64")
    edit(source, "k6.py", monkeypatch, tmp_path, "GROWTH = 8.0", "GROWTH = 7.0")
    assert provenance.digest("k6_r64") != rows  # as `from . import k6` too
    monkeypatch.setattr(cache, "KERNELS", Path(source))
    monkeypatch.setattr(cache, "compiler", lambda: {"versions": ["9.9"]})
    assert provenance.digest("k6") != before


def test_a_stale_digest_and_other_machine_code_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made_up("k2", digest="0" * 64)
    assert "k2: its sources, options or compiler are not those of its record on NVIDIA H200" in records.stale(
        record
    )
    monkeypatch.setattr(records, "committed", lambda: {"k2": [record], "k1": []})
    assert records.main([]) == 1
    out = capsys.readouterr().out
    assert "k1: no record" in out and "--renew" in out
    # By hand, a digest looks current; compiling tells.
    by_hand = replace(record, digest=provenance.digest("k2"))
    assert records.stale(by_hand) is None
    assert len(records.changed(by_hand)) == 4
    # Renewing compiles, and writes nothing where the machine code is another.
    monkeypatch.setattr(records.Record, "path", tmp_path / "k2.json")
    monkeypatch.setattr(records, "committed", lambda: {"k2": [record]})
    assert records.main(["--renew"]) == 1
    assert capsys.readouterr().out.count("aaaaaaaaaaaa passed, the source compiles to ") == 4
    assert not (tmp_path / "k2.json").exists()
    monkeypatch.setattr(records.machine_code, "identity", lambda compiled: "a" * 64)
    assert records.main(["--renew"]) == 0
    assert records.load(tmp_path / "k2.json") == by_hand
