"""The difference between neighbours on the ladder."""

import pytest

from harness.diff import code_lines, difference, main


def test_code_without_its_comments() -> None:
    source = (
        '"""Title."""\n\nx = 1  # why\n\n\ndef f():\n    """Doc\n    string."""\n'
        '    # note\n    return """text # kept"""\n'
    )
    assert code_lines(source) == ["x = 1", "def f():", '    return """text # kept"""']


def test_difference_of_two_files() -> None:
    lines, added, removed = difference("k2", "k3_1")
    assert lines[:2] == ["--- kernels/k2.py", "+++ kernels/k3.py"]
    assert "+            kv_pipeline.consumer_wait(kv_get)" in lines
    assert "-            load_tile(mK, sKV, kv_block, self.threads)" in lines
    assert added == len([line for line in lines[2:] if line.startswith("+")]) > removed > 0


def test_stages_of_one_file_differ_in_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k3_1", "k3_3"]) == 0
    out = capsys.readouterr().out
    assert "one file; the options are {'stages': 1} and {'stages': 5}" in out
    assert "k3_1 → k3_3: 0 lines of code added, 0 removed" in out


def test_unknown_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k2", "k99"]) == 2
    assert capsys.readouterr().err.startswith("harness.diff: unknown stage 'k99'")
