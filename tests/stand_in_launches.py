"""The library's calls on a CPU, where kernels, their memory and CUDA are stood in for."""

from types import SimpleNamespace

import pytest
import torch

from hopper_attention import memory, production, selection
from hopper_attention.kernels.contract import Problem
from hopper_attention.plans import Plans

Launched = list[tuple[str, Problem, tuple]]


def check_as_a_launch(least: Problem, q, k, v, o, *rest: object) -> None:
    """What compiled host code checks of its tensors: `test_cache.py` shows it on a real one."""
    if least.direction == "decode":
        q, k, v, o = (x.transpose(1, 2) for x in (q, k, v, o))
    like_q, like_o, like_k, like_v, rows = [q], [o], [k], [v], [rest[0]]
    if least.direction == "bwd":
        do, dq, dk, dv, *rows = rest[:5]
        like_q, like_o, like_k, like_v = [q, dq], [o, do], [k, dk], [v, dv]
        rows += [rest[-1]] * least.lse_grad
    columns = v.shape[3] if least.head_dim not in (64, 128, 256) else q.shape[3]
    of_q, of_k = q.shape, (*k.shape[:3], q.shape[3])
    wanted = (like_q, of_q), (like_k, of_k), (like_o, (*of_q[:3], columns)), (like_v, (*of_k[:3], columns))
    for tensors, shape in wanted:
        if any(x.shape != shape or x.dtype != q.dtype or x.data_ptr() % 16 for x in tensors):
            raise ValueError("Mismatched Tensor")
    if any(x.shape != q.shape[:3] or x.dtype != torch.float32 for x in rows):
        raise ValueError("Mismatched Tensor")


def stand_in_for_kernels(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What is compiled and launched from now on: stage, what it was compiled for, arguments."""
    found: Launched = []

    def kernel_for(stage_id: str, least: Problem, options: dict) -> SimpleNamespace:
        def launch(*given: object) -> None:
            check_as_a_launch(least, *given)
            found.append((stage_id, least, given))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(selection, "kernel_for", kernel_for)
    monkeypatch.setattr(production, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(production, "plans", Plans())
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(production, "current_device", lambda: None)
    stand_in_for_memory(monkeypatch)
    return found


def stand_in_for_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scratch on the CPU, of one stream, of which nothing is kept yet. How many zeros graphs could have had
    whenever somebody waited for the stream."""
    for name in ("_counters", "_memory", "_zeros"):
        monkeypatch.setattr(memory, name, {})
    monkeypatch.setattr(memory, "_of_graphs", [])
    monkeypatch.setattr(memory, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(memory, "as_argument", lambda x: x)
    monkeypatch.setattr(memory, "is_capturing", lambda: False)
    monkeypatch.setattr(memory, "current_stream", lambda index: 7)
    waits: list[int] = []
    wait = lambda: waits.append(sum(x.numel() for x in memory._zeros.values()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=wait))
    return waits


def tensors(*shape: int, count: int = 3, dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def forward(q, k, v, scale=None, causal=False, top_left=False):
    return production.forward(q, k, v, scale, causal, top_left)


def backward(q, k, v, dlse=None, scale=None, causal=False, deterministic=False, do=None, lse=None):
    lse = torch.zeros(q.shape[:3]) if lse is None else lse
    do = torch.zeros_like(q) if do is None else do
    o = torch.zeros_like(q)
    return production.backward(do, q, k, v, o, lse, dlse, scale, causal, False, deterministic)
