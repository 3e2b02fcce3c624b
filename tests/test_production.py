"""What happens between an operator and a launch, on a CPU, where kernels and CUDA are stood in for."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from stand_in_launches import Launched, backward, forward, stand_in_for_kernels, tensors

from hopper_attention import few_queries, launch, production, selection, tuned
from hopper_attention.checks import problem_of
from hopper_attention.choice import slower
from hopper_attention.kernels import calls_decode
from hopper_attention.kernels.contract import Problem


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    return stand_in_for_kernels(monkeypatch)


def test_a_second_call_of_a_kind_plans_nothing(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    forward(q, k, v)
    backward(q, k, v)
    for name in ("_plan_forward", "_plan_backward", "problem_of"):
        monkeypatch.setattr(production, name, None)
    forward(q.clone(), k.clone(), v.clone())
    backward(q.clone(), k.clone(), v.clone())
    assert [stage_id for stage_id, *_ in launched] == ["k6_r64", "bwd4_one"] * 2
    assert launched[0][2][-1] is launched[2][2][-1]  # the counter


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "mask", "scale"])
def test_another_kind_is_planned_anew(change: str, launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    forward(q, k, v, causal=True)
    options = {"causal": True}
    if change == "shape":
        q, k, v = tensors(2, 4, 17, 64)
    elif change == "strides":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "dtype":
        q, k, v = tensors(2, 4, 16, 64, dtype=torch.float16)
    elif change == "mask":
        options = {"causal": False}
    else:
        options["scale"] = 1.0
    forward(q, k, v, **options)
    assert len(production.plans) == 2
    _, least, given = launched[1]
    assert (least.dtype, least.causal, least.scaled) == (
        str(q.dtype).removeprefix("torch."), options["causal"], change == "scale",
    )  # fmt: skip
    assert (given[-1] == 1.0) if change == "scale" else isinstance(given[-1], torch.Tensor)
    assert given[3].stride() == q.stride()


def test_the_default_scale_is_the_kernels_constant(launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    forward(q, k, v, scale=0.125)
    backward(q, k, v, scale=0.125)
    assert [least.scaled for _, least, _ in launched] == [False, False]


def test_what_gradients_are_computed_with(launched: Launched) -> None:
    q, k, v = tensors(2, 4, 160, 128)  # more than a tile of keys
    dlse = torch.ones(2, 4, 160)
    backward(q, k, v, deterministic=True)
    backward(q, k, v, dlse=dlse)
    backward(q, k, v, dlse=dlse, scale=0.5)
    assert [(x, least.scaled, least.lse_grad) for x, least, _ in launched] == [
        ("bwd4_det", False, False), ("bwd4", True, True), ("bwd4", True, True),
    ]  # fmt: skip
    assert launched[1][2][-2] == 128**-0.5
    assert launched[2][2][-2] == 0.5
    assert launched[2][2][-1].equal(dlse)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads"), [(70000, 1, 1), (1, 70000, 70000), (1, 70000, 7), (2, 3, 1)]
)
def test_more_batches_or_heads_than_a_grid_has(
    batch: int, heads: int, kv_heads: int, launched: Launched
) -> None:
    """Every head of every batch once, with its key head, in launches that a grid can have."""
    q = torch.zeros(batch, heads, 1, 64, dtype=torch.float16)
    k = torch.zeros(batch, kv_heads, 1, 64, dtype=torch.float16)
    found = backward(q, k, k.clone())
    seen, seen_kv = torch.zeros(batch, heads), torch.zeros(batch, kv_heads)
    for *_, given in launched:
        q_, k_, dq_, dk_ = given[0], given[1], given[5], given[6]
        assert max(q_.shape[0], q_.shape[1], k_.shape[1]) <= 65535
        for x, whole, count in ((q_, q, seen), (k_, k, seen_kv)):
            first = (x.data_ptr() - whole.data_ptr()) // (64 * 2)
            b, h = divmod(first, whole.shape[1])
            count[b : b + x.shape[0], h : h + x.shape[1]] += 1
        assert dq_.data_ptr() - found[0].data_ptr() == q_.data_ptr() - q.data_ptr()
        assert dk_.data_ptr() - found[1].data_ptr() == k_.data_ptr() - k.data_ptr()
        assert q_.shape[1] // k_.shape[1] == heads // kv_heads
    assert bool((seen == 1).all())
    assert bool((seen_kv == 1).all())


def test_heads_that_are_left_over_have_a_launch_of_their_own(launched: Launched) -> None:
    """24 heads of 12 tiles of keys are two rounds of 132 and 24 tiles."""
    q, k, v = tensors(1, 24, 1536, 128)
    backward(q, k, v, deterministic=True)
    kinds = [(stage_id, given[0].shape[1]) for stage_id, _, given in launched]
    assert kinds == [("bwd4_det", 22), ("bwd4_parts_det", 2)]
    first, last = (given for *_, given in launched)
    assert last[0].data_ptr() - first[0].data_ptr() == 2 * q[0, :22].numel()
    backward(q, k, v)
    backward(q, k, v, causal=True, deterministic=True)
    assert [given[0].shape[1] for *_, given in launched[2:]] == [24, 24]


def test_whole_batches_that_are_left_over(launched: Launched) -> None:
    """3 × 2 heads of 33 tiles: a round is two batches of them."""
    q, k, v = tensors(3, 2, 4172, 128)
    backward(q, k, v, deterministic=True)
    assert [tuple(given[0].shape[:2]) for *_, given in launched] == [(2, 2), (1, 2)]
    first, last = (given for *_, given in launched)
    assert last[1].data_ptr() - first[1].data_ptr() == 2 * k[:2].numel()


def test_gradients_that_lie_unreadably_are_copied(launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    odd = torch.ones(q.numel() + 3, dtype=q.dtype)[3:].view_as(q)
    for do in (torch.ones((), dtype=q.dtype).expand_as(q), torch.ones_like(q).mT.contiguous().mT, odd):
        backward(q, k, v, do=do)
        assert launched[-1][2][4].stride() == (4096, 1024, 64, 1)
        assert launched[-1][2][4].data_ptr() % 16 == 0
        assert launched[-1][2][4].equal(do)
    row = torch.zeros(2, 4, 1, 64, dtype=q.dtype)
    backward(row, row.clone(), row.clone(), do=torch.ones(2, 4, 64, 1, dtype=q.dtype).mT)  # strides …, 1, 1
    assert launched[-1][2][4].stride() == (256, 64, 64, 1)


def test_of_nothing_nothing_is_launched(launched: Launched) -> None:
    for shape in ((2, 3, 0, 64), (0, 3, 16, 64), (2, 0, 16, 64)):
        q, k, v = tensors(*shape)
        assert forward(q, k, v)[0].shape == shape
        assert [x.shape for x in backward(q, k, v)] == [shape] * 3
    q, k = torch.zeros(2, 3, 0, 64).half(), torch.ones(2, 3, 5, 64).half()
    _, dk, dv = backward(q, k, k)
    assert not dk.any()
    assert not dv.any()
    assert launched == []


def test_pointers_are_looked_at_in_every_call(launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    forward(q, k, v)
    backward(q, k, v)
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view_as(q)
    for inputs in ((shifted, k, v), (q, shifted, v), (q, k, shifted)):
        with pytest.raises(ValueError, match="starts 2 bytes past a 16-byte boundary"):
            forward(*inputs)
        with pytest.raises(ValueError, match="starts 2 bytes past a 16-byte boundary"):
            backward(*inputs)
        assert "aligned" in production.reason_against("fwd", *inputs, None, False, False)
    assert production.reason_against("fwd", q, k, v, None, False, False) is None  # it was the pointer
    assert len(launched) == 2


@pytest.mark.parametrize("name", ["do", "o", "lse", "dlse"])
def test_what_a_backward_call_refuses(name: str, launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    given = {"do": torch.zeros_like(q), "o": torch.zeros_like(q), "lse": torch.zeros(2, 4, 16)}
    given |= {"dlse": torch.zeros(2, 4, 16)}
    given[name] = given[name][:, :, 1:]
    with pytest.raises(ValueError, match=f"^{name} must be "):
        production.backward(
            given["do"], q, k, v, given["o"], given["lse"], given["dlse"], None, False, False, False
        )
    assert launched == []


def test_reasons(launched: Launched) -> None:
    q, k, v = tensors(2, 4, 16, 64)
    against = lambda *x, direction="fwd", scale=None: production.reason_against(
        direction, *x, scale, False, False
    )
    assert against(q, k, v) is None
    assert against(q, k, v, direction="bwd") is None
    assert "takes head_dim" in against(*tensors(2, 4, 16, 264))
    assert "one dtype" in against(q, k.half(), v)
    assert "softmax_scale must be positive" in against(q, k, v, scale=-1.0)
    assert "contiguous in its last" in against(q.mT.contiguous().mT, k, v)
    slow = lambda problem: f"{problem.direction} is slow"
    assert production.reason_against("bwd", q, k, v, None, False, False, slow) == "bwd is slow"


@pytest.mark.parametrize("name", ["k", "v", "o", "do", "lse", "dlse"])
@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_what_a_launch_refuses_is_named(name: str, wrong: str, launched: Launched) -> None:
    """What a plan does not follow from may differ in a later call; the launch finds it, and it is named."""

    def made() -> dict[str, torch.Tensor]:
        found = {x: torch.zeros(2, 4, 16, 64).half() for x in ("do", "q", "k", "v", "o")}
        return found | {x: torch.zeros(2, 4, 16) for x in ("lse", "dlse")}

    def both(inputs: dict[str, torch.Tensor]) -> None:
        if name in ("k", "v"):
            forward(*(inputs[x] for x in ("q", "k", "v")))
        production.backward(*inputs.values(), None, False, False, False)

    both(made())
    first, inputs = len(launched), made()
    x = inputs[name]
    if wrong == "dtype":
        inputs[name] = x.to(torch.bfloat16 if x.dtype == torch.float16 else torch.int32)
    else:
        inputs[name] = x[:, :, :15] if name != "k" else x[..., :15, :]
    words = f"^{name} must be " if name not in ("k", "v") else "k and v must have one|q, k and v must have"
    with pytest.raises((TypeError, ValueError), match=words):
        both(inputs)
    assert len(launched) == first


@pytest.mark.parametrize(("sms", "together_"), [(132, 2), (114, 2), (4, 2), (3, 1), (2, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("with_lse", [True, False])
def test_few_queries_are_decoded(
    launched: Launched, scale: float | None, with_lse: bool, sms: int, together_: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As from a cache, whose dimensions have another order, by as many CTAs as the GPU has SMs."""
    monkeypatch.setattr(tuned, "gpu", lambda device: tuned.Gpu(sms))
    (q,), (k, v) = tensors(2, 8, 4, 128, count=1), tensors(2, 2, 4096, 128, count=2)
    o, lse = production.forward(q, k, v, scale, True, False, with_lse)
    [(stage_id, least, given)] = launched
    assert (stage_id, least.causal, least.scaled) == ("decode", True, False)
    assert [x.shape for x in given[:4]] == [x.transpose(1, 2).shape for x in (q, k, v, q)]
    assert given[3].data_ptr() == o.data_ptr() and o.stride() == q.stride()
    assert given[4].shape == (2, 8, 4) and (lse is given[4] or not with_lse)
    scratch, (together, used_scale, left) = given[-6:-3], given[-3:]
    assert used_scale == (scale or 128**-0.5) and left is None and together == together_
    asked, options = few_queries.as_decode(problem_of(q, k, v, True)), {"rows": 16, "unit": 0, "cluster": 2}
    wanted = calls_decode.decode_scratch(asked, options, sms)
    assert [tuple(x.shape) for x in scratch] == [shape for shape, _ in wanted.values()]


def test_what_is_decoded_and_what_is_not() -> None:
    few = Problem(1, 32, 8, 4, 4096, 128, True)
    assert selection.forward_stage(few) == "decode"
    assert selection.forward_stage(few.with_(causal=False, scaled=True)) == "decode"
    for other in (
        {"top_left": True}, {"head_dim": 80}, {"seqlen_q": 512}, {"seqlen_kv": 4},
        {"seqlen_q": 1, "top_left": True}, {"value_dim": 64},
    ):  # fmt: skip
        assert selection.forward_stage(few.with_(**other)) != "decode", other


def test_a_backward_pass_is_launched_in_one_go(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is several kernels that share counters with those of another thread on the same stream."""
    inside, most = [], []

    def launch(*given: object) -> None:
        inside.append(1)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()

    stand_in = SimpleNamespace(launch=launch)
    monkeypatch.setattr(selection, "kernel_for", lambda *given: stand_in)
    q, k, v = tensors(2, 4, 16, 64)
    threads = [threading.Thread(target=backward, args=(q, k, v)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


@pytest.mark.parametrize(("head_dim", "seqlen"), [(264, 16), (36, 16), (264, 0)])
def test_other_head_dims_of_groups(head_dim: int, seqlen: int, launched: Launched) -> None:
    """Refused by name, or where there is nothing to compute, zero."""
    q, k = torch.zeros(1, 8, seqlen, head_dim).half(), torch.zeros(1, 2, 16, head_dim).half()
    if seqlen:
        with pytest.raises(ValueError, match="bwd4 takes head_dim in multiples of 8 up to 256"):
            backward(q, k, k.clone())
    else:
        assert not backward(q, k, k.clone())[1].any()
    for direction in ("fwd", "bwd"):
        production.reason_against(direction, q, k, k, None, False, False, slower)
        production.reason_against(direction, q[:0], k[:0], k[:0], None, False, False, slower)


def test_kernels_are_for_the_sms_of_the_gpu(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are the choices, which on fewer SMs find less idle."""
    asked, kernel_for = [], selection.kernel_for
    monkeypatch.setattr(
        selection, "kernel_for", lambda *what: asked.append((what[0], what[2])) or kernel_for(*what)
    )
    q, k, v = tensors(1, 8, 1024, 128)
    for sms, stages in ((132, ["k6_r64", "bwd4_parts"]), (20, ["k6", "bwd4"])):
        monkeypatch.setattr(tuned, "gpu", lambda device, sms=sms: tuned.Gpu(sms))
        production.plans.clear()
        forward(q, k, v)
        backward(q, k, v)
        assert [stage_id for stage_id, _ in asked] == stages
        assert [options.get("sms", 132) for _, options in asked] == [sms] * 2
        asked.clear()
    monkeypatch.undo()
    properties = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert tuned.gpu() == tuned.Gpu(114)
    assert tuned.gpu(torch.device("cpu")) == tuned.H200
    assert launch.sms_option(114) == {"sms": 114}
    assert launch.sms_option(132) == {}
