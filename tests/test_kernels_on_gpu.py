"""Every case of every stage on the GPU, where there is one.

By itself: python -m pytest tests/test_kernels_on_gpu.py -n 0. Several workers share the GPU's memory, which
the first stages need for all their scores, and a sanitizer has five minutes.
"""

import shutil

import pytest
import torch

import ref_check
from harness.results import repository
from hopper_attention.kernels import ladder

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage_id", ladder.CHECKED)
def test_every_case(stage_id: str) -> None:
    assert ref_check.main([stage_id, "--no-sanitizer"]) == 0


@pytest.mark.skipif(HOPPER and SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("stage_id", ladder.CHECKED)
def test_sanitizers(
    stage_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(repository())  # the sanitizer runs `ref_check.py` from here
    assert ref_check.main([stage_id, "--only", "sanitizer"]) == 0
    assert f"{stage_id}  pass  sanitizer" in capsys.readouterr().out  # the case ran
