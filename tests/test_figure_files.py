"""Figures as files: the same bytes each time, whatever a user has set, and none where there is nothing to
draw; of which problem the ladder's is, and how a rate is written."""

from pathlib import Path

import matplotlib
import pytest
from made_up_results import FOLDER, backward_sample, make_results, make_row, sample, sweep_problem

from harness import plots, report
from harness.results import Results
from hopper_attention.kernels.contract import Problem


def test_figures_are_deterministic(tmp_path: Path) -> None:
    ladder = {stage: sample(stage, rate) for stage, rate in (("k1", 0.5), ("k2", 8.0))}
    for name, draw in (
        ("stage", lambda path: plots.plot_stage(ladder["k2"], path)),
        ("progress", lambda path: plots.plot_progress(ladder, path)),
    ):
        first, second = tmp_path / f"{name}1.png", tmp_path / f"{name}2.png"
        draw(first)
        draw(second)
        assert first.read_bytes().startswith(b"\x89PNG")
        assert len(first.read_bytes()) > 10_000
        assert first.read_bytes() == second.read_bytes()
        assert b"Software" not in first.read_bytes()


def test_figures_ignore_the_users_settings(tmp_path: Path) -> None:
    plots.plot_progress({"k2": sample()}, tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "figure.dpi": 50}):
        plots.plot_progress({"k2": sample()}, tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_figures_need_something_to_draw(tmp_path: Path) -> None:
    odd = make_results("k2", make_row("k2", 7.0, Problem.square(1, 3, 77, 64, False)))
    with pytest.raises(ValueError, match="k2 hold no row of the sweep"):
        plots.plot_stage(odd, tmp_path / "a.png")
    with pytest.raises(ValueError, match="no bwd results"):
        plots.plot_progress({"k2": sample()}, tmp_path / "a.png", direction="bwd")
    assert list(tmp_path.iterdir()) == []


def test_progress_falls_back_to_the_longest_common_length() -> None:
    def results(stage: str, *seqlens: int) -> Results:
        return make_results(stage, *(make_row(stage, 1.0, sweep_problem(n)) for n in seqlens))

    at = plots.progress_problem
    assert at([results("k1", 512, 4096, 8192), results("k2", 4096, 8192)], 128, "fwd").seqlen_q == 4096
    assert at([results("k1", 512, 1024), results("k2", 512, 1024, 4096)], 128, "fwd").seqlen_q == 1024
    assert at([results("k1", 512), results("k2", 1024)], 128, "fwd").seqlen_q == 4096


def test_rates_are_written_at_the_precision_worth_reading() -> None:
    written = {612.4: "612", 99.96: "100", 48.25: "48.2", 9.999: "10.0", 4.131: "4.13", 0.0521: "0.052"}
    assert {rate: plots.format_rate(rate) for rate in written} == written


def test_backward_figures(tmp_path: Path) -> None:
    measured = {"k2": sample(), "bwd1": backward_sample(), "bwd2": backward_sample("bwd2", 8.0)}
    drawn = report.figures(tmp_path, {FOLDER: measured})
    names = {path.name for path in drawn}
    assert names == {"k2.png", "bwd1.png", "bwd2.png", "progress.png", "progress_bwd.png"}
    for path, draw in drawn.items():
        draw(path)
        assert path.stat().st_size > 10_000
