"""What was measured of the library: what is committed, what it says of today's choices, what is no file."""

import json
import random
from pathlib import Path

import pytest
import torch

from harness import host, library, logits, policy_suite, results, row_files, suite, suites, training
from harness.command import Usage
from harness.host import BOTH, FORWARD, OURS, PLAIN
from harness.policy_suite import PACKED, WINDOW
from harness.results import repository
from harness.stages import refuse
from hopper_attention import few_queries, launch, precompile, selection, tuned
from hopper_attention.choice import slower
from hopper_attention.kernels import bwd4_operands, division, k6, k6_rows, ladder
from hopper_attention.kernels.calls import UNDIVIDED, Parts
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device import key_tiles, limits
from hopper_attention.kernels.device.constants import SMS
from hopper_attention.launch import BACKWARD as BACKWARD_STAGE
from hopper_attention.launch import FORWARD as FORWARD_STAGE
from hopper_attention.launch import LIBRARY, ONE_TILE, ONE_TILE_IN_PARTS
from hopper_attention.tuned import Gpu

FOLDER = repository() / "results" / "h200"
WRONG_BY, MICROSECOND = 1.03, 1.0  # a choice of a way may cost so much over the best, or so many µs
MODELS = [
    (direction, row) for direction in ("fwd", "bwd") for row in library.load(FOLDER, f"models_{direction}")
]
of_model = lambda value: value if isinstance(value, str) else f"{value['family']}: {value['name']}"


@pytest.mark.parametrize(("direction", "row"), MODELS, ids=of_model)
def test_the_choice_is_right_where_it_was_measured(direction: str, row: dict) -> None:
    (found,) = library.models([row], direction)
    cost = row["us"][found.way] * (1 - 1 / found.regret)
    assert found.regret <= WRONG_BY or cost <= MICROSECOND
    assert slower(found.problem) is None


@pytest.mark.parametrize("row", library.load(FOLDER, "few_fwd"), ids=of_model)
def test_the_choice_is_right_of_few_queries(row: dict) -> None:
    (found,) = library.models([row], "fwd")
    assert found.regret <= WRONG_BY


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_problem_of_the_suite_has_its_row(direction: str) -> None:
    rows = library.load(FOLDER, f"models_{direction}")
    measured = [(row["family"], row["name"], suite.problem_of(row, direction)) for row in rows]
    expected = [(x.family, x.name, x.problem.with_(direction=direction)) for x in suites.MODELS]
    assert measured == expected
    for row in rows:
        problem = suite.problem_of(row, direction)
        assert {suite.way_of(x, problem) for x in suite.ways(problem)} & {*row["us"]}
        assert suite.chosen(problem) in row["us"]
        assert {*suite.PEERS} & {*row["us"]}


def test_the_suite_is_of_models() -> None:
    assert len(suites.MODELS) >= 40
    assert len({x.problem for x in suites.MODELS}) == len(suites.MODELS)
    assert all(x.source and x.family for x in suites.MODELS)
    families = [x.family for x in suites.MODELS]
    assert all(families.count(x) >= 2 for x in families)
    for stage_id in (FORWARD_STAGE, BACKWARD_STAGE):
        for x in suites.MODELS:
            refuse(stage_id, x.problem.with_(direction=suite.DIRECTIONS[stage_id]))


# ---- choices -----------------------------------------------------------------------------------------------


def made_up(chance: random.Random, direction: str = "bwd") -> Problem:
    kv_heads, group = chance.choice((1, 2, 3, 8)), chance.choice((1, 2, 6, 7, 16))
    causal = chance.random() < 0.6
    lengths = [chance.choice((1, 77, 128, 1000, 4096)) for _ in range(2)]
    return Problem(
        chance.choice((1, 2, 9)), kv_heads * group, kv_heads, *lengths, chance.choice((64, 128, 256)), causal,
        direction=direction, top_left=causal and chance.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("sms", [78, 114, 132])
def test_any_problem_is_covered_by_one_way(sms: int) -> None:
    """The way is one that there is, of a stage that takes the problem, whatever the GPU."""
    chance, shorter, divided, decoded = random.Random(1), 0, 0, 0
    for _ in range(300):
        problem = made_up(chance)
        given = problem.with_(scaled=True, lse_grad=True)
        stage_id, parts = selection.backward_stage(problem, False, gpu=Gpu(sms))
        assert selection.backward_stage(given, False, gpu=Gpu(sms)) == (stage_id, parts)
        refuse(stage_id, problem)
        one, few = problem.seqlen_kv <= 128 and problem.head_dim < 256, False
        if one and problem.causal and not problem.top_left and problem.seqlen_q > 3 * problem.seqlen_kv:
            one, few = False, True  # most queries see no key
        if problem.causal and problem.seqlen_q == problem.seqlen_kv:
            few |= parts is None and problem.seqlen_q <= division.TURNS_SHORT
            if problem.head_dim == 128 and problem.seqlen_q <= division.TURNS_SEQLEN:
                turning = division.parts_of(problem, sms, deterministic=True).heads
                few |= -(-problem.seqlen_kv // 128) * problem.batch * problem.kv_heads * turning >= 3 * sms
        turns = stage_id in (launch.DETERMINISTIC, launch.DETERMINISTIC_IN_PARTS)
        assert (stage_id in (ONE_TILE, ONE_TILE_IN_PARTS)) == one
        assert turns == (few and problem.head_dim < 256 and not one)
        if parts is not None:
            assert (problem.heads // problem.kv_heads) % parts.heads == 0
            assert parts.queries == 1 or 2 * parts.queries <= -(-problem.seqlen_q // 64)
            divided += 1
        problem = problem.with_(direction="fwd")
        stage_id = selection.forward_stage(problem, gpu=Gpu(sms))
        decoded += stage_id == launch.DECODE
        refuse(stage_id, few_queries.as_decode(problem) if stage_id == launch.DECODE else problem)
        assert division.rows_of(problem, sms) in division.TILES[problem.head_dim]
        shorter += stage_id != FORWARD_STAGE
    assert shorter > 30
    assert divided > 50
    assert decoded > 5


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ((1, 8, 8, 128, 128, 64), False),
        ((1, 8, 8, 512, 512, 64), False),
        ((1, 32, 8, 512, 8192, 128), False),
        ((1, 8, 1, 512, 8192, 128), False),  # 64 tiles
        ((1, 16, 16, 77, 4096, 128), False),  # 32, whose keys are divided
        ((1, 32, 8, 1, 4096, 128), False),  # decode's
        ((1, 32, 8, 16, 4096, 128), False),
        ((1, 32, 8, 1, 128, 128), True),
        ((64, 32, 8, 1, 2048, 128), True),  # half a gigabyte
        ((64, 32, 8, 2, 2048, 128), False),
        ((1, 32, 8, 1, 4096, 80), True),  # which decode does not take
        ((1, 32, 8, 4, 4096, 80), False),  # and slices do
        ((4, 32, 8, 16, 1024, 128), True),  # in whole tiles
        ((1, 8, 8, 512, 512, 32), False),  # which nobody asks about: it is refused
    ],
)
def test_forward_passes_that_others_divide_are_left(shape: tuple[int, ...], left: bool) -> None:
    assert (slower(Problem(*shape, False)) is not None) == left
    assert slower(Problem(*shape, False, direction="bwd")) is None


def test_tiles_are_the_kernels_own() -> None:
    """Stated once more where no kernel file, and with it the compiler, is imported."""
    wide = dict.fromkeys((192, 256), key_tiles.ROWS)
    keys = dict.fromkeys(bwd4_operands.CONFIGS, bwd4_operands.TILE_KV) | wide
    assert keys == limits.TILE_KV
    queries = {d: config.tile_q for d, config in bwd4_operands.CONFIGS.items()} | wide
    assert queries == division.STEP_Q
    for head_dim, tiles in division.TILES.items():
        own, *shorter = tiles
        configs = {own: k6.CONFIGS[head_dim]} | {rows: k6_rows.SHORT[rows][head_dim] for rows in shorter}
        for rows, config in configs.items():
            assert rows == key_tiles.ROWS * config.consumers
            assert (config.tile_kv, config.ctas) == (tiles[rows].keys, tiles[rows].ctas)
            assert tiles[rows].step <= tiles[rows].alone <= config.ctas * tiles[rows].step


def test_registers_of_a_sm_suffice() -> None:
    """What consumers ask for must be what the producer's warpgroup gives back, or they wait forever."""
    for config in [*k6.CONFIGS.values(), *(x for short in k6_rows.SHORT.values() for x in short.values())]:
        warpgroups = config.consumers + 1
        at_launch = min(255, 65536 // (128 * warpgroups * config.ctas)) // 8 * 8
        producer, consumer = config.registers
        assert producer + config.consumers * consumer <= warpgroups * at_launch, config


def test_no_step_is_lost_between_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of keys goes to one SM; and dividing takes none from the queries."""
    chance = random.Random(2)
    monkeypatch.setattr(division, "HEAD_STEPS", 0)  # who sees a head more often has more of these
    for _ in range(100):
        problem = made_up(chance).with_(head_dim=64)
        group = problem.heads // problem.kv_heads
        tiles = -(-problem.seqlen_kv // limits.TILE_KV[64]) * problem.batch * problem.kv_heads
        of_tiles = [
            sum(division.loads_of(problem, x)) - division.TILE_STEPS[problem.head_dim] * tiles * x.count
            for x in (Parts(), Parts(heads=group), Parts(queries=3), Parts(group, 2))
        ]
        assert of_tiles == pytest.approx([of_tiles[0]] * 4)
        assert len(division.loads_of(problem, Parts())) == SMS
        if not problem.causal:
            assert of_tiles[0] == pytest.approx(tiles * group * -(-problem.seqlen_q // 128))


def test_the_longest_of_few_key_heads_is_shortened() -> None:
    """8 query heads of one key head at 8192 tokens: 64 tiles for 132 SMs."""
    problem = Problem(1, 8, 1, 8192, 8192, 128, True, direction="bwd")
    longest = 8 * (128 + division.HEAD_STEPS) + division.TILE_STEPS[problem.head_dim]
    assert max(division.loads_of(problem, Parts())) == pytest.approx(longest)
    assert division.parts_of(problem).count >= 2
    assert division.parts_of(problem.with_(head_dim=256)).count >= 2
    assert division.parts_of(problem.with_(batch=64)) == UNDIVIDED


def test_tables_and_figure_of_what_is_committed(tmp_path: Path) -> None:
    tables = {"training": training.training_table, "losses": training.apart_table, "host": library.host_table}
    for name, table in (*tables.items(), ("training", training.losses_table)):
        rows = library.load(FOLDER, name)
        assert table(rows).count("\n") >= 3
    training.plot_training(library.load(FOLDER, "training"), tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_losses_are_drawn(tmp_path: Path) -> None:
    training.plot_losses(library.load(FOLDER, "losses"), tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    short = {"model": "small", "seqlen": 1024, "how": "eager", "seed": 0, "attention": "sdpa", "gpu": "H200"}
    with pytest.raises(ValueError, match="no run of 60 steps or more"):
        training.plot_losses([short | {"losses": [5.0] * 59}], tmp_path / "losses.png")


def test_runs_of_other_seeds_are_no_pair() -> None:
    runs = [(0, "sdpa", 3.0), (0, "sdpa", 3.5), (1, "sdpa", 9.0), (1, "fa2", 9.5), (0, "cudnn", 3.25)]
    rows = [{"seed": seed, "attention": name, "losses": [loss]} for seed, name, loss in runs]
    first, second = training.of_seeds(rows)
    assert training.pairs_apart(first, "sdpa", "sdpa") == [[0.5], [0.25], [0.25]]
    assert training.pairs_apart(second, "fa2", "sdpa") == [[0.5]]
    assert training.pairs_apart(second, "sdpa", "sdpa") == training.pairs_apart(first, "fa2", "sdpa") == []


def test_losses_are_held_against_sdpas_first_run() -> None:
    run = {"model": "small", "seqlen": 1024, "how": "eager"}
    losses = {
        "hopper_attention": [[5.0, 3.25]],
        "sdpa": [[5.0, 3.0], [5.5, 3.0]],
        "fa2": [[5.0, 2.5], [4, 3]],
    }
    rows = [run | {"attention": name, "losses": x} for name, found in losses.items() for x in found]
    (line,) = training.losses_table(rows).splitlines()[2:]
    assert line == "| small, 1024 | eager | 2 | 3.0000 | 0.2500 | 0.5000 |  | 1.0000 |  |  |"


def test_losses_of_several_seeds() -> None:
    """From SDPA's, of which cuDNN is one, and from fp32's, where a seed has it: no run from itself."""
    run = {"model": "1.3B", "seqlen": 8192, "how": "eager"}
    losses = {
        (0, "sdpa"): [[5.0, 3.0], [5.0, 3.25]],
        (0, "cudnn"): [[5.0, 3.0]],
        (0, "hopper_attention"): [[5.0, 3.5]],
        (0, "fp32"): [[5.0, 3.75]],
        (1, "sdpa"): [[4.0, 2.0]],
        (1, "hopper_attention"): [[4.25, 2.0]],
    }
    rows = [
        run | {"seed": seed, "attention": name, "losses": x}
        for (seed, name), found in losses.items()
        for x in found
    ]
    from_sdpa, from_fp32 = (line.split(" | ") for line in training.apart_table(rows).splitlines()[2:])
    # ours: (0.5 + 0.25 + 0.5)/3 of seed 0, 0.25 of seed 1; SDPA's: 0.25, 0, 0.25, of seed 0 alone
    assert from_sdpa[1:6] == ["2", "SDPA", "2", "0.33333, 0.50000", "0.16667, 0.25000"]
    assert from_sdpa[-1] == "0.66667, 0.75000 |"
    assert from_fp32[1:6] == ["2", "in fp32", "1", "0.25000, 0.25000", "0.66667, 0.75000"]
    assert from_fp32[-1] == " |"


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


@pytest.mark.parametrize("command", [host, logits])
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


def test_logits_beside_sdpa() -> None:
    """Another token counts where SDPA is sure, and only there; so does an error beyond SDPA's."""
    exact = torch.zeros(1, 4, 3)
    exact[..., 0] = torch.tensor([1.0, 1.0, 1.0, 0.005])  # at the last position nobody can be sure
    theirs = exact + 0.01 * torch.tensor([1.0, -1.0, 0.0])
    row = logits.beside(theirs, theirs.clone(), exact)
    assert (row["positions"], row["sure"], row["same"]) == (4, 4, 4)
    theirs[0, 3] = torch.tensor([0.0, 0.005, 0.0])
    row = {"model": "BERT", "way": "in one pass"} | logits.beside(theirs, exact, exact)
    assert (row["sure"], row["same"], row["our_error"]) == (3, 3, 0.0)
    assert logits.failures(row) == []
    row = row | logits.beside(theirs, exact.roll(1, -1), exact)
    assert logits.failures(row) == [
        "BERT, in one pass: error 1, SDPA's 0.01", "BERT, in one pass: 0 of the 3 tokens that SDPA is sure of"
    ]  # fmt: skip
    row = row | logits.beside(theirs, torch.full_like(exact, torch.nan), exact)
    assert logits.failures(row) == ["BERT, in one pass: error nan, SDPA's 0.01"]


@pytest.mark.parametrize("name", ["host", "models_fwd", "models_bwd"])
def test_what_is_saved_is_what_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = json.loads((FOLDER / "library" / f"{name}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(results, "results_dir", lambda: tmp_path)
    path = row_files.save(name, committed["rows"], committed["environment"])
    assert path == tmp_path / "h200" / "library" / f"{name}.json"
    assert json.loads(path.read_text(encoding="utf-8")) == committed
    assert library.load(tmp_path / "h200", name) == library.load(FOLDER, name)


def test_rows_of_another_environment_are_neither_mixed_nor_lost(tmp_path: Path) -> None:
    environment = {
        "gpu": "NVIDIA H200",
        "driver": "1",
        "torch": "2",
        "cutlass_dsl": "4",
        "peers": {"fa4": "1"},
    }
    assert row_files.rows_to_join(tmp_path, "models_fwd", environment) == ([], environment)
    path = row_files.save("models_fwd", [{"us": {"k6": 1.0}}], environment, tmp_path)
    rows = [{"us": {"k6": 1.0}}]
    assert row_files.rows_to_join(tmp_path, "models_fwd", environment) == (rows, environment)
    before = path.read_bytes()
    others = {
        "driver was '1' and is '2'": {"driver": "2"},
        "peers.fa4 was '1' and is '2'": {"peers": {"fa4": "2"}},
        "fa4 is not there": {"peers": {"flex": "3"}},
    }
    for said, other in others.items():
        with pytest.raises(ValueError, match=f"another environment: {said}"):
            row_files.rows_to_join(tmp_path, "models_fwd", environment | other)
    assert path.read_bytes() == before
    more = environment | {"peers": {"fa4": "1", "flex": "3"}}
    assert row_files.rows_to_join(tmp_path, "models_fwd", more) == (rows, more)


@pytest.fixture
def suite_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """What is measured, as if there were a GPU; a problem with a key of 128 columns fails."""
    measured: list[Problem] = []

    def measure(problem: Problem, peer_names: list[str]) -> dict[str, float]:
        measured.append(problem)
        if problem.head_dim == 128:
            raise RuntimeError("wrong")
        return {"attention": 2.0, "attention_backward": 2.0, "k6": 1.9} | dict.fromkeys(peer_names, 3.0)

    environment = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "cutlass_dsl": "4"}
    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(suite, "ahead", list)
    monkeypatch.setattr(suite.peers, "versions", lambda names: dict.fromkeys(names, "1"))
    monkeypatch.setattr(suite.timing, "environment", lambda found: environment | {"peers": found})
    monkeypatch.setattr(suite.tuned, "gpu", lambda: tuned.H200)
    return measured


def test_a_suite_is_saved_row_by_row(suite_on_a_gpu: list[Problem], tmp_path: Path) -> None:
    of_64 = lambda problem: problem.head_dim == 64
    assert suite.run("models", ["k6", "bwd4"], tmp_path, ["cudnn"], of_64)
    assert [x.flops for x in suite_on_a_gpu] == sorted(
        x.flops for x in suite_on_a_gpu if x.direction == "fwd"
    ) + (sorted(x.flops for x in suite_on_a_gpu if x.direction == "bwd"))
    expected = [x.name for x in suites.MODELS if x.problem.head_dim == 64]
    for direction in ("fwd", "bwd"):
        rows = library.load(tmp_path / "h200", f"models_{direction}")
        assert [row["name"] for row in rows] == expected
    assert not suite.run("models", ["k6"], tmp_path, ["cudnn"], lambda problem: not of_64(problem))
    rows = library.load(tmp_path / "h200", "models_fwd")  # what failed is not there, what was there stays
    assert {row["head_dim"] for row in rows} == {64, 256}


def test_suites_that_cannot_be_are_refused(
    suite_on_a_gpu: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lambda **changes: suite.run(
        **{"suite": "models", "stage_ids": ["k6"], "folder": tmp_path, "peer_names": ["cudnn"]}
        | {"wanted": lambda problem: problem.head_dim == 64}
        | changes
    )
    assert not run(peer_names=[])
    assert not list(tmp_path.rglob("*.json"))
    with pytest.raises(Usage, match="no problem of the suite"):
        run(wanted=lambda problem: False)
    assert run()
    with pytest.raises(Usage, match="another environment"):
        run(peer_names=["fa2"])
    monkeypatch.setattr(suite.tuned, "gpu", lambda: tuned.Gpu(132, dict(division.TILES)))
    with pytest.raises(Usage, match="tuned"):
        run()


def test_a_problem_that_only_one_direction_has_keeps_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    for direction in ("fwd", "bwd"):
        path = folder / "library" / f"models_{direction}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads((FOLDER / "library" / path.name).read_text(encoding="utf-8"))["rows"]
        path.write_text(json.dumps({"rows": rows[1:] if direction == "bwd" else rows}))
    library.plot_models(folder, tmp_path / "models.png")
    assert (tmp_path / "models.png").stat().st_size > 10_000


def test_what_is_precompiled_is_what_is_called() -> None:
    for sms, options in ((132, {}), (114, {"sms": 114})):
        assert all(x == options for _, _, x in precompile.jobs_of(FORWARD_STAGE, sms))
    assert all(x == {} for _, _, x in precompile.jobs_of("k2", 114))


def test_what_a_suite_compiles_first_is_what_calls_ask_for() -> None:
    """Of both suites: a kernel that none of its calls runs would be compiled for nothing."""
    jobs = [job for x in suites.MODELS for job in suite.kernels(x.problem)]
    jobs += [job for x in suites.MODELS for job in suite.kernels(x.problem.with_(direction="bwd"))]
    packed = [x.problem.with_(direction=direction) for x in PACKED + WINDOW for direction in ("fwd", "bwd")]
    jobs += [job for problem in packed for job in policy_suite.kernels(problem)]
    jobs += [job for x in suites.FEW for job in suite.kernels(x.problem)]
    named = *LIBRARY, precompile.POLICIES, precompile.FEW_QUERIES
    of_calls = [job for stage_id in named for job in precompile.jobs_of(stage_id)]
    assert not {repr(job) for job in jobs} - {repr(job) for job in of_calls}
    assert {stage_id for stage_id, *_ in jobs} == {*LIBRARY, launch.DECODE}


def test_options_are_the_stages_own() -> None:
    """Stated once more where no kernel file, and with it the compiler, is imported."""
    for stage_id in LIBRARY:
        assert selection.OPTIONS.get(stage_id, {}) == ladder.load(stage_id)[0].options
    assert {*selection.OPTIONS} <= {*LIBRARY}
