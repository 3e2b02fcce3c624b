"""The inputs and questions of `harness.accuracy` and `harness.quantizing`, as far as they need no GPU."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from harness import accuracy, quantized, quantizing, reference, rotation, row_files, timing
from harness.decoding_tables import decode_table
from harness.library import NOTHING, accuracy_tables, load_rows, quantizing_table
from harness.quantized import E4M3
from harness.results import repository
from hopper_attention import production_fp8
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

PROBLEM = Problem.square(1, 4, 1024, 128, False)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(problem: Problem, q, k, v) -> torch.Tensor:
    return reference.reference(q, k, v, problem.causal)[0].to(q.dtype)


def mean_of_values(problem: Problem, q, k, v) -> torch.Tensor:
    return v.float().mean(2, keepdim=True).expand(q.shape).to(q.dtype)


def test_inputs_are_what_they_are_called() -> None:
    q, k, v = accuracy.normal(PROBLEM, generator())
    assert q.dtype == torch.bfloat16 and q.shape == v.shape == (1, 4, 1024, 128)
    assert all(abs(x.float().std().item() - 1) < 0.01 for x in (q, k, v))
    for x in accuracy.rare_outliers(PROBLEM, generator()):
        struck = (x.float().abs() > 5.5).float().mean().item()
        assert struck == pytest.approx(1e-3 * math.erfc(5.5 / math.sqrt(2 * 101)), rel=0.15)
    q, k, v = accuracy.outlier_channels(PROBLEM, generator())
    size = k.float().square().mean((0, 1, 2)).sqrt()
    assert (size > 40).nonzero().flatten().tolist() == [0, 32, 64, 96]
    assert max(x.float().abs().max() for x in (q, v)) < 8
    q, k, v = accuracy.one_sided(PROBLEM, generator())
    assert (v >= 0).all() and abs(q.float().std().item() - 0.1) < 0.01


def test_a_vector_that_all_keys_share_changes_no_attention() -> None:
    """So that what `of_centred_keys` is given and what it gives are one, but for roundings to bf16."""
    problem = PROBLEM.with_(seqlen_q=256, seqlen_kv=256)
    q, k, v = accuracy.shifted_keys(problem, generator())
    means = k.float().mean(2)
    assert means.std().item() == pytest.approx(10, rel=0.1)
    assert (k.float() - means[:, :, None]).std().item() == pytest.approx(1, rel=0.05)
    found = accuracy.of_centred_keys(exact)(problem, q, k, v)
    assert torch.allclose(found.float(), exact(problem, q, k, v).float(), atol=0.03)


def test_options_are_called_as_in_the_ablation() -> None:
    variants = ladder.load("k7")[1].VARIANTS
    assert {name: variants[name] for name in accuracy.WITHOUT_EXPONENTIALS} == accuracy.WITHOUT_EXPONENTIALS


def test_seeds_draw_the_same_again_and_others() -> None:
    draws = [accuracy.rare_outliers(PROBLEM, generator(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_needles_are_found_by_attention_alone() -> None:
    contenders = {"exact": exact, "mean": mean_of_values}
    found = {
        (row["contender"], row["keys"]): row["found"] for row in accuracy.found_needles(contenders, (2048,))
    }
    assert found["exact", 2048] == 1.0
    assert found["mean", 2048] < 0.1


def test_a_needle_has_its_weight() -> None:
    problem = Problem(1, 2, 2, accuracy.DEPTHS, 4096, 128, False)
    (q, k, _), _, _ = accuracy.needles(problem, generator())
    weights = ((q.float() @ k.float().mT) / math.sqrt(128)).softmax(-1).amax(-1)
    assert weights.median().item() == pytest.approx(accuracy.WEIGHT, rel=0.3)


def test_errors_are_of_the_inputs_before_rounding() -> None:
    rows = list(accuracy.outliers({"exact": exact}, Problem.square(1, 1, 128, 64, False)))
    assert [row["inputs"] for row in rows] == ["normal", "rare_outliers", "outlier_channels"]
    assert all(0 < row["rmse"] < 2**-8 for row in rows), "bf16's rounding of O"
    rows = list(accuracy.long_sums({"exact": exact, "mean": mean_of_values}, (256,)))
    by_name = {(row["inputs"], row["contender"]): row["relative_rmse"] for row in rows}
    assert by_name["one_sided", "exact"] < 2**-8 < by_name["normal", "mean"]


def test_rotation_is_worth_what_it_is_where_outliers_meet() -> None:
    """The errors of scores in notes/k8.md: of pairs of a query and a key with an outlier in one channel, and
    of the rest."""
    q, k, v = accuracy.rare_outliers(Problem.square(1, 4, 2048, 128, False), generator())
    scores = lambda a, b: (a.float() @ b.float().mT) / math.sqrt(128)
    meet = (q.abs() > 6).float() @ (k.abs() > 6).float().mT > 0
    errors = {}
    for rotate in (False, True):
        made = quantized.quantize_reference(q, k, v, rotate=rotate, signs=production_fp8.signs(128))
        off = scores(*made.dequantized[:2]) - scores(q, k)
        errors[rotate] = [off[which].square().mean().sqrt().item() for which in (meet, ~meet)]
    assert errors[False] == pytest.approx([0.41, 0.040], rel=0.05)
    assert errors[True] == pytest.approx([0.099, 0.041], rel=0.05)


def test_a_rotation_alone_is_worth_as_much_as_with_scales_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As notes/k8.md has it of more and longer draws."""
    monkeypatch.setattr(accuracy, "SEEDS", range(3))
    rows = accuracy.outliers(
        accuracy.YARDSTICKS, Problem.square(1, 2, 1024, 128, False), (accuracy.rare_outliers,)
    )
    errors_of = lambda rows: {row["contender"].replace("'s yardstick", ""): row["rmse"] for row in rows}
    errors = errors_of(rows)
    assert errors["k7, rotated"] == pytest.approx(errors["k8"], rel=0.1)
    assert errors["k7, rotated"] < 0.6 * errors["k7"] and errors["k8"] < 0.7 * errors["k7, scales of blocks"]
    small = functools.partial(accuracy.rare_outliers, deviation=3.0)
    small.__name__ = "small"
    rows = accuracy.outliers(accuracy.YARDSTICKS, Problem.square(1, 2, 512, 128, False), (small,))
    errors = errors_of(rows)
    assert max(errors.values()) < 1.1 * min(errors.values()), "nothing is gained"


def test_no_row_of_a_peer_that_is_not_here_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = json.loads((repository() / "results/h200/library/accuracy.json").read_text("utf-8"))[
        "environment"
    ]
    path = row_files.save("accuracy", [{"question": "outliers"}], environment, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(accuracy, "hopper_gpu", lambda: True)
    monkeypatch.setattr(timing, "environment", lambda peers: environment | {"peers": {"fa3": "another"}})
    monkeypatch.setattr(accuracy, "QUESTIONS", {"outliers": lambda: pytest.fail("measured")})
    assert accuracy.main(["--save", str(tmp_path)]) == 2
    assert "cudnn is not there" in capsys.readouterr().err and path.read_bytes() == before


def test_a_picture_of_the_rotation(tmp_path: Path) -> None:
    """Codes move up, since no outlier holds the others down; no product is most of its score any more."""
    before, after = rotation.spreads().values()
    for spread in (before, after):
        assert sum(spread.codes) == pytest.approx(100) and sum(spread.products) == pytest.approx(100)
    peak = [rotation.BINADES[spread.codes.index(max(spread.codes))] for spread in (before, after)]
    assert peak == [4, 6]
    half, tenth = rotation.SHARES // 2, rotation.SHARES // 10
    assert sum(before.products[half:]) > 70 and sum(after.products[tenth:]) == 0
    for name in ("once.png", "again.png"):
        rotation.plot_rotation(tmp_path / name)
    assert (tmp_path / "once.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_one_that_cannot_is_left_out_only_if_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> torch.Tensor:
        raise RuntimeError("no kernel")

    problem = Problem.square(1, 1, 64, 64, False)
    inputs = accuracy.normal(problem, generator())
    monkeypatch.setitem(accuracy.PEERS, "fa3", cannot)
    assert list(accuracy._attempts({"fa3": cannot}, problem, inputs)) == []
    with pytest.raises(RuntimeError, match="no kernel"):
        list(accuracy._attempts({"k7": cannot}, problem, inputs))


def test_codes_apart() -> None:
    apart = lambda *pairs: quantizing.steps_apart(
        *(torch.tensor(x, dtype=torch.uint8).view(E4M3) for x in zip(*pairs, strict=True))
    ).tolist()
    assert apart((0x00, 0x80), (0x7F, 0xFF), (0x38, 0x38)) == [0, 0, 0]
    assert apart((0x38, 0x39), (0x01, 0x81), (0xB8, 0xB9)) == [1, 2, 1]
    assert apart((0x7F, 0x7E))[0] > 100


def test_tables() -> None:
    row = {"question": "needles", "keys": 1024, "contender": "fa3", "found": 0.0}
    assert "| FlashAttention-3 | 0% |" in accuracy_tables([row])["accuracy-needles"]
    row = {"question": "options", "inputs": "shifted_keys", "contender": "k8", "rmse": 0.0072, "spread": 7e-5}
    assert "| k8 | 0.0072 ± 7e-05 |" in accuracy_tables([row])["accuracy-options"]
    row = {"head_dim": 64, "seqlen": 16384, "way": "plain", "us": 77.71, "bytes": 1, "of_copy": 0.978}
    assert "| plain | 77.7, 0.98 |" in quantizing_table([row])


def test_table_of_decoding() -> None:
    plain = {"batch": 1, "heads": 32, "kv_heads": 8, "queries": 1, "keys": 2048, "head_dim": 128, "page": 0}
    plain |= {"eight_bits": False, "ragged": False, "bytes": 8_388_608, "errors": {}, "single_us": 26.7}
    rows = [
        plain
        | {
            "us": {"hopper_attention": 7.0, "cudnn": 8.4, "fa3": 14.0},
            "without_pdl_us": 7.5,
            "reads_us": 6.3,
        },
        plain | {"us": {"hopper_attention": 8.0, "fa2": 6.0}, "keys": 4096},
        plain | {"us": {"hopper_attention": 10.0}, "page": 16, "eight_bits": True, "errors": {"fa3": "no"}},
    ]
    text = decode_table(rows)
    assert "| 1, 32:8, 1, 2048 |  | 8 MB | **7.0** | 7.5 | 0.900 | 8.4 |  | 14.0 | 1.20 | 1.20 |" in text
    assert "| 1, 32:8, 1, 2048 | e4m3, pages of 16 | 8 MB | **10.0** |  |  |  |  |  |  | 0.84 |" in text
    assert "The 2 rows without a remark: 0.750 to 1.200" in text
    assert text.endswith("below 1.000: 1, 32:8, 1, 4096 (0.750).")
    assert decode_table([]) == NOTHING
    failed = plain | {"us": {"cudnn": 8.4}, "without_pdl_us": None}
    alone = plain | {"us": {"hopper_attention": 10.0}, "without_pdl_us": None}
    text = decode_table([failed, alone])
    assert "**10.0** |  |" in text and "8.4" not in text and "rows without a remark" not in text


def test_rows_of_decoding_may_hold_zeros_and_reasons(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [{"page": 0, "us": {"x": 1.0}, "errors": {"fa3": "no pages"}}]}))
    assert load_rows(path, zeros=True)[0]["errors"] == {"fa3": "no pages"}
    with pytest.raises(ValueError, match="not positive"):
        load_rows(path)
