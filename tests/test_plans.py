"""Plans are found again for inputs of their kind, and only where PyTorch would dispatch them alike."""

import contextlib

import pytest
import torch
from test_ops import Modes, Tagged

from hopper_attention import plans
from hopper_attention.plans import Plans

OPTIONS = "fwd", None, True


def tensors(*shape: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape or (2, 4, 8, 16), dtype=dtype) for _ in range(3)]


@pytest.fixture
def known() -> Plans[str]:
    found: Plans[str] = Plans()
    found.keep(OPTIONS, tensors(), "plan")
    return found


def test_inputs_of_the_same_kind(known: Plans[str]) -> None:
    assert known.recently(OPTIONS, *tensors()) == known.find(OPTIONS, *tensors()) == "plan"
    assert known.find(("fwd", None, False), *tensors()) is None


@pytest.mark.parametrize("at", [0, 1, 2])
def test_inputs_of_another_kind(at: int, known: Plans[str]) -> None:
    for change in (
        lambda x: x[:, :, :7],
        lambda x: x.half(),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.to("meta"),
        lambda x: x.flatten(0, 1),
    ):
        inputs = tensors()
        inputs[at] = change(inputs[at])
        assert known.find(OPTIONS, *inputs) is None


def test_what_is_one_tensor_twice(known: Plans[str]) -> None:
    """The check by which plans are found first asks for different tensors."""
    x = tensors()[0]
    assert known.recently(OPTIONS, x, x, x) is None
    assert known.find(OPTIONS, x, x, x) == "plan"


@contextlib.contextmanager
def of_vmap():
    with torch._functorch.vmap.vmap_increment_nesting(1, "error"):
        yield


@pytest.mark.parametrize("seen_by", ["Dispatch", "autocast", "vmap", "grad", "subclass", "sign", "zeros"])
def test_what_would_be_dispatched_elsewhere_is_not_found_at_once(seen_by: str, known: Plans[str]) -> None:
    """Such a call has to go through the operator."""
    q, k, v = tensors()
    context = contextlib.nullcontext()
    if seen_by in ("Dispatch", "autocast"):
        context = getattr(Modes, seen_by)()
    elif seen_by == "vmap":
        context = of_vmap()
    elif seen_by == "grad":
        context = torch._functorch.eager_transforms.grad_increment_nesting()
    elif seen_by == "subclass":
        v = v.as_subclass(Tagged)
    elif seen_by == "sign":
        v = torch._neg_view(v)
    else:
        v = torch._efficientzerotensor(v.shape, dtype=v.dtype)
    with context:
        assert known.recently(OPTIONS, q, k, v) is None
    assert known.recently(OPTIONS, *tensors()) == "plan"


def test_subclasses_are_never_found_at_once() -> None:
    """Not even by one another: in inference mode all are dispatched as plain tensors are."""
    found: Plans[str] = Plans()
    with torch.inference_mode():
        q, k, v = [x.as_subclass(Tagged) for x in tensors()]
        found.keep(OPTIONS, (q, k, v), "plan")
        assert found.recently(OPTIONS, q, k, v) is None
        assert found.find(OPTIONS, q, k, v) == "plan"


def test_the_last_few_kinds_are_looked_at_first(known: Plans[str]) -> None:
    for n in range(plans.RECENT):
        known.keep(OPTIONS, tensors(1, 1, n + 1, 16), f"of {n}")
    assert known.recently(OPTIONS, *tensors()) is None
    assert known.recently(OPTIONS, *tensors(1, 1, 1, 16)) == "of 0"
    assert known.find(OPTIONS, *tensors()) == known.recently(OPTIONS, *tensors()) == "plan"
    assert known.recently(OPTIONS, *tensors(1, 1, 1, 16)) is None
    assert known.find(OPTIONS, *tensors(1, 1, 1, 16)) == "of 0"


def test_too_many_kinds_are_forgotten(known: Plans[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KINDS_MAX", 2)
    known.keep(OPTIONS, tensors(1, 1, 1, 16), "second")
    known.keep(OPTIONS, tensors(1, 1, 2, 16), "third")
    assert list(known.values()) == ["third"]
    assert known.find(OPTIONS, *tensors()) is None
