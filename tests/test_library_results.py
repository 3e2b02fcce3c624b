"""What was measured of the library: what is committed, what it says of today's choices, what is no file."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import host, library, parts, results
from harness.host import BOTH, FORWARD, OURS, PLAIN
from harness.results import repository
from hopper_attention import choice
from hopper_attention.choice import slower
from hopper_attention.kernels import bwd4_operands, calls, k6
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device import key_tiles
from hopper_attention.kernels.device.constants import SMS

FOLDER = repository() / "results" / "h200"
WRONG_BY = 1.03  # a choice of parts may cost so much over the best
ROWS = library.load(FOLDER, "parts")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(library.problem_of(row)))
def test_the_choice_of_parts_is_right_where_it_was_measured(row: dict) -> None:
    _, regret, ratio = library.choice_of(row)
    assert regret <= WRONG_BY
    assert ratio >= 1.0
    assert slower(library.problem_of(row)) is None


def test_every_problem_has_its_row() -> None:
    measured = [library.problem_of(row) for row in ROWS]
    assert sorted(map(str, measured)) == sorted(str(Problem(*x, direction="bwd")) for x in parts.PROBLEMS)
    for row in ROWS:
        group = row["heads"] // row["kv_heads"]
        every = {f"parts {x}" for x in range(1, group + 1) if group % x == 0}
        assert every < {*row["us"]}
        assert {*row["us"]} - every <= {*parts.PEERS}


def made_up(chance: random.Random) -> Problem:
    kv_heads, group = chance.choice((1, 2, 3, 8)), chance.choice((1, 2, 6, 7, 16))
    causal = chance.random() < 0.6
    lengths = [chance.choice((1, 77, 128, 1000, 4096)) for _ in range(2)]
    return Problem(
        chance.choice((1, 2, 9)), kv_heads * group, kv_heads, *lengths, chance.choice((64, 128, 256)), causal,
        direction="bwd", top_left=causal and chance.random() < 0.5,
    )  # fmt: skip


def test_any_problem_is_divided_into_whole_parts() -> None:
    chance, divided = random.Random(1), 0
    for _ in range(300):
        problem = made_up(chance)
        group, found = problem.heads // problem.kv_heads, calls.parts_of(problem)
        assert group % found == 0
        assert found == 1 or (problem.head_dim < 256 and calls.refuse_divided(problem) is None)
        divided += found > 1
    assert divided > 50


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ((1, 8, 8, 128, 128, 64), False),  # a head is one tile
        ((1, 8, 8, 512, 512, 64), True),
        ((1, 8, 8, 2048, 2048, 64), True),
        ((1, 12, 12, 1500, 1500, 64), False),
        ((4, 8, 8, 1024, 1024, 64), False),
        ((1, 8, 8, 512, 512, 128), False),
        ((1, 32, 8, 512, 8192, 128), True),
        ((1, 32, 8, 2048, 8192, 128), False),
        ((1, 32, 8, 1, 4096, 128), True),
        ((1, 8, 8, 512, 512, 32), False),  # which nobody asks about: it is refused
    ],
)
def test_forward_passes_with_few_tiles_are_left(shape: tuple[int, ...], left: bool) -> None:
    """As 98 shapes beside SDPA's flash and cuDNN backends had it; notes/library.md."""
    assert (slower(Problem(*shape, False)) is not None) == left


def test_tiles_are_the_kernels_own() -> None:
    """Stated once more where no kernel file, and with it the compiler, is imported."""
    assert calls.TILE_KV == bwd4_operands.TILE_KV
    assert choice.KEYS == {64: bwd4_operands.TILE_KV, 128: bwd4_operands.TILE_KV, 256: key_tiles.ROWS}
    assert {d: key_tiles.ROWS * config.consumers for d, config in k6.CONFIGS.items()} == choice.QUERIES


def test_no_step_is_lost_between_the_sms() -> None:
    """Every tile of keys goes to one SM; and dividing takes none from the query heads."""
    chance = random.Random(2)
    for _ in range(100):
        problem = made_up(chance).with_(head_dim=64)
        group = problem.heads // problem.kv_heads
        tiles = -(-problem.seqlen_kv // calls.TILE_KV) * problem.batch * problem.kv_heads
        of_tiles = [sum(calls.loads_of(problem, x)) - calls.TILE_STEPS * tiles * x for x in (1, group)]
        assert of_tiles[0] == pytest.approx(of_tiles[1])
        assert len(calls.loads_of(problem, 1)) == SMS
        if not problem.causal:
            assert of_tiles[0] == tiles * group * -(-problem.seqlen_q // 128)


def test_the_longest_of_few_key_heads_is_shortened() -> None:
    """8 query heads of one key head at 8192 tokens: 64 tiles for 132 SMs."""
    problem = Problem(1, 8, 1, 8192, 8192, 128, True, direction="bwd")
    assert max(calls.loads_of(problem, 1)) == 8 * 128 + calls.TILE_STEPS
    assert calls.parts_of(problem) == 4
    assert calls.parts_of(problem.with_(head_dim=256)) == 1
    assert calls.parts_of(problem.with_(batch=64)) == 1


def test_tables_and_figure_of_what_is_committed(tmp_path: Path) -> None:
    for name, table in (("host", library.host_table), ("training", library.training_table)):
        rows = library.load(FOLDER, name)
        assert table(rows).count("\n") >= 3
    library.plot_training(library.load(FOLDER, "training"), tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_without_files_nothing_is_said(tmp_path: Path) -> None:
    assert set(library.blocks(tmp_path, {}).values()) == {library.NOTHING}
    assert library.figures(tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '[{"us": -1.0}]', '[{"us": {"parts 1": NaN}}]', '{"rows": 3}']
)
def test_what_is_no_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "host.json").write_text(text)
    with pytest.raises(ValueError, match=r"host\.json"):
        library.load(tmp_path, "host")


# ---- what measures it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [host, parts])
def test_without_a_gpu_nothing_is_measured(command, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert command.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_host_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everybody is called, forward and through autograd, and has the least of its rounds."""
    asked = []

    def sdpa(*inputs, is_causal):
        asked.append(PLAIN)
        return inputs[0] * inputs[1] * inputs[2]

    def ours(*inputs, causal):
        asked.append(OURS)
        return sdpa(*inputs, is_causal=causal)

    times = iter(range(10**6, 0, -1))
    for name, stand_in in (("attention", ours), ("scaled_dot_product_attention", sdpa), ("DEVICE", "cpu")):
        monkeypatch.setattr(host, name, stand_in)
    monkeypatch.setattr(host, "ROUNDS", 2)

    def microseconds(call, calls: int, rounds: int) -> int:
        call()
        return next(times)

    monkeypatch.setattr(host.timing, "host_microseconds", microseconds)
    rows = host.measure((1, 2, 3, 4))
    assert [(row["what"], row["provider"]) for row in rows] == [
        (what, name) for what in (FORWARD, BOTH) for name in (OURS, PLAIN, "SDPA, flash", "SDPA, cuDNN")
    ]
    assert [row["us"] for row in rows[:4]] == [10**6 - 4 - i for i in range(4)]  # of the second round
    assert asked.count(OURS) == 4


def test_every_number_of_parts_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gradients that differ from bwd4's stop it."""
    problem = Problem(1, 6, 1, 16, 16, 64, True, direction="bwd")
    wrong_in = None

    def gradients(divided: int, *inputs: object) -> list[torch.Tensor]:
        return [torch.ones(3) * (1.02 if divided == wrong_in else 1.0)] * 3

    stand_in = SimpleNamespace(
        forward=lambda q, *rest: (q, q),
        _plan_backward=lambda *x: calls.parts_of(problem),
        _backward=gradients,
    )
    monkeypatch.setattr(parts, "production", stand_in)
    monkeypatch.setattr(parts, "random_inputs", lambda problem: [torch.ones(2)] * 4)
    monkeypatch.setattr(parts.peers, "versions", lambda names: dict.fromkeys(names, "1"))
    peer = SimpleNamespace(build=lambda *x: lambda: None)
    lacking = SimpleNamespace(build=lambda *x: 1 / 0)
    monkeypatch.setattr(parts.peers, "PEERS", dict.fromkeys(parts.PEERS, peer) | {"fa4": lacking})
    timed = lambda found, seconds: {name: SimpleNamespace(ms_median=0.5) for name in found}
    monkeypatch.setattr(parts.timing, "interleaved", timed)
    before = calls.parts_of
    assert parts.measure(problem) == dict.fromkeys(
        ("parts 1", "parts 2", "parts 3", "parts 6", "fa2", "cudnn", "fa3"), 500.0
    )
    wrong_in = 3
    with pytest.raises(RuntimeError, match="gradients in 3 parts are not bwd4's"):
        parts.measure(problem)
    assert calls.parts_of is before


@pytest.mark.parametrize("name", ["host", "parts"])
def test_what_is_saved_is_what_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = json.loads((FOLDER / "library" / f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(results, "results_dir", lambda: tmp_path)
    path = results.save_library(name, committed["rows"], committed["environment"])
    assert path == tmp_path / "h200" / "library" / f"{name}.json"
    assert json.loads(path.read_text(encoding="utf-8")) == committed
    assert library.load(tmp_path / "h200", name) == library.load(FOLDER, name)
