"""Lengths, offsets and pages that are looked at on request, and what is refused of them."""

import subprocess
import sys

import pytest
import torch

from hopper_attention import decoding, flash_attn_varlen_func, flash_attn_with_kvcache, lengths, policies
from hopper_attention.memory import WHOLE, part_of

ON_GPU = "must be on a CUDA device, not cpu"  # what is refused last: there is no GPU here


def integers(*x: object) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "cache_seqlens, added, table, message",
    [
        (integers(0, 48), 0, None, None),
        (integers(0, 49), 0, None, r"cache_seqlens\[1\] = 49: the cache has room for 0 to 48 keys"),
        (integers(-1, 3), 0, None, r"cache_seqlens\[0\] = -1: "),
        (integers(5, 46), 3, None, r"cache_seqlens\[1\] = 46 and 3 new ones: the cache has room for 0 to 48"),
        (integers(16, 96), 0, integers([7, -1], [0, 6]), r"block_table\[0, 0\] = 7 holds keys of a sequence"),
        (integers(48, 96), 0, integers([6, -1], [0, 6]), None),
        (integers(48, 96), 0, integers([6, -1], [0, -1]), r"block_table\[1, 1\] = -1 holds keys"),
        (integers(48, 97), 0, integers([6, -1], [0, 6]), r"cache_seqlens\[1\] = 97: .* room for 0 to 96"),
        (
            integers(48, 95),
            1,
            integers([6, 9], [0, 6]),
            r"block_table\[0, 1\] = 9 holds keys of a sequence of 49",
        ),
    ],
)
def test_caches(cache_seqlens, added: int, table, message: str | None) -> None:
    k_cache = ones(2, 48, 2, 64) if table is None else ones(7, 48, 2, 64)
    given = k_cache, ones(2, added, 2, 64) if added else None, cache_seqlens, table
    if message is None:
        lengths.look_at_cache(*given)
    else:
        with pytest.raises(ValueError, match=message):
            lengths.look_at_cache(*given)


@pytest.mark.parametrize(
    "cu_q, cu_kv, used_q, used_kv, message",
    [
        (integers(0, 4, 4, 10), integers(0, 0, 9, 20), None, None, None),
        (integers(2, 4, 4, 8), integers(0, 0, 9, 20), integers(2, 0, 4), integers(0, 9, 3), None),
        (integers(0, 5, 4, 10), integers(0, 0, 9, 20), None, None, "cu_seqlens_q decreases from 5 to 4 at 1"),
        (
            integers(0, 4, 4, 10),
            integers(0, 0, 9, 21),
            None,
            None,
            "cu_seqlens_k goes from 0 to 21: k has 20",
        ),
        (integers(-1, 4, 4, 10), integers(0, 0, 9, 20), None, None, "cu_seqlens_q goes from -1 to 10"),
        (
            integers(0, 4, 4, 10),
            integers(0, 0, 9, 20),
            integers(5, 0, 6),
            None,
            r"seqused_q\[0\] = 5: .* 4 rows",
        ),
        (integers(0, 4, 4, 10), integers(0, 0, 9, 20), None, integers(0, 9, -1), r"seqused_k\[2\] = -1"),
        (integers(0), integers(0), None, None, None),
    ],
)
def test_packed_sequences(cu_q, cu_kv, used_q, used_kv, message: str | None) -> None:
    given = ones(10, 8, 64), ones(20, 2, 64), cu_q, cu_kv, used_q, used_kv
    if message is None:
        lengths.look_at_packing(*given)
    else:
        with pytest.raises(ValueError, match=message):
            lengths.look_at_packing(*given)


@pytest.mark.parametrize(("used", "longest", "wrong"), [(None, 0, None), (None, 11, None), (None, 10, 11),
                                                        ((9, 0, 4), 9, None), ((9, 0, 5), 8, 9)])  # fmt: skip
def test_keys_of_packed_sequences_beside_the_longest(used, longest: int, wrong: int | None) -> None:
    used = None if used is None else integers(*used)
    given = ones(10, 8, 64), ones(20, 2, 64), integers(0, 4, 4, 10), integers(0, 9, 9, 20), None, used
    if wrong is None:
        lengths.look_at_packing(*given, longest)
    else:
        with pytest.raises(ValueError, match=f"max_seqlen_k is {longest}, and sequence . has {wrong} rows"):
            lengths.look_at_packing(*given, longest)


def test_calls_look_if_they_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched, and not at all otherwise."""
    plan = policies.Plan((), (part_of(print, WHOLE, WHOLE, {}),), ())
    launched = lambda *_: "launched"
    for module, name, made in (
        (decoding._plans, "find", decoding.Made(plan, (), None)),
        (policies, "_made", policies.Made(plan, ())),
    ):
        monkeypatch.setattr(module, name, lambda *_, made=made: made)
    for module in (decoding, policies):
        monkeypatch.setattr(module, "run_on", launched)
    offsets = policies.Tensors(None, integers(0, 9), integers(0, 21))
    q, k = ones(9, 8, 64), ones(20, 2, 64)
    calls = (
        (
            lambda: decoding.decode(
                ones(2, 1, 8, 64), *[ones(2, 48, 2, 64)] * 2, None, None, integers(3, 49)
            ),
            r"cache_seqlens\[1\] = 49",
        ),
        (
            lambda: policies.forward(q, k, k, offsets, None, False, False, (-1, -1), 0.0),
            "cu_seqlens_k goes from 0 to 21",
        ),
        (
            lambda: policies.backward(
                q, q, k, k, q, q, None, offsets, None, False, False, (-1, -1), 0.0, False
            ),
            "cu_seqlens_k goes from 0 to 21",
        ),
    )
    for call, message in calls:
        monkeypatch.setattr(lengths, "CHECKED", False)
        assert call() == "launched"
        monkeypatch.setattr(lengths, "CHECKED", True)
        with pytest.raises(ValueError, match=message):
            call()


def packed_pages(table: torch.Tensor, cu: torch.Tensor, used: torch.Tensor | None = None, page: int = 16):
    q, cache = ones(2, 8, 64), ones(3, page, 2, 64)
    options = {"seqused_k": used, "block_table": table, "causal": True}
    return flash_attn_varlen_func(q, cache, cache, integers(0, 1, 2), cu, **options)


def test_pages_of_packed_sequences_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fits, wrong, cu = integers([0, 9], [2, 1]), integers([0, 9], [2, 3]), integers(0, 16, 40)
    monkeypatch.setattr(lengths, "CHECKED", False)
    with pytest.raises(ValueError, match=ON_GPU):
        packed_pages(wrong, cu)
    monkeypatch.setattr(lengths, "CHECKED", True)
    with pytest.raises(ValueError, match=ON_GPU):
        packed_pages(fits, cu)
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] = 3 holds keys of a sequence of 24: .* 2$"):
        packed_pages(wrong, cu)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] - cu_seqlens_k\[1\] = 33: .* 0 to 32 keys"):
        packed_pages(fits, integers(0, 16, 49))
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] - cu_seqlens_k\[1\] = -16: "):
        packed_pages(fits, integers(0, 16, 0))
    with pytest.raises(ValueError, match=r"seqused_k\[0\] = 64: .* 0 to 32 keys"):
        packed_pages(fits, cu, integers(64, 3))
    with pytest.raises(ValueError, match=r"seqused_k\[0\] = 1: .* 0 to 0 keys"):
        packed_pages(fits, cu, integers(1, 0), page=0)


def test_numbers_are_looked_at_always() -> None:
    q, cache = ones(2, 1, 8, 64), ones(2, 48, 2, 64)
    with pytest.raises(ValueError, match="cache_seqlens = 49: "):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=49)


@pytest.mark.parametrize("value, asked", [("", False), ("0", False), ("1", True)])
def test_the_environment_asks(value: str, asked: bool) -> None:
    code = "from hopper_attention import lengths; print(lengths.CHECKED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={lengths.VARIABLE: value, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(asked), done.stderr


def test_nothing_is_looked_at_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    look = lambda: lengths.look_at_cache(ones(2, 48, 2, 64), None, integers(99, 99), None)
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] = 99"):
        look()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        look()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        if capturing:
            look()
        else:
            with pytest.raises(ValueError, match=r"cache_seqlens\[0\] = 99"):
                look()


@pytest.mark.gpu
@pytest.mark.parametrize("page", (0, 16, 128))
def test_nothing_is_written_beside_a_cache(page: int) -> None:
    """New keys of lengths that the cache has no room for, of negative ones and of pages that are not there.
    The cache lies in the middle of memory, whose other rows, and the right sequence's old keys, stay."""
    torch.manual_seed(0)
    batch, room, new = 4, 256, 3
    places = (batch, room) if not page else (batch * room // page, page)
    memory = torch.randn(2, 3 * places[0], places[1], 2, 64, device="cuda").bfloat16()
    k_cache, v_cache = memory[:, places[0] : 2 * places[0]]
    table = torch.arange(places[0], dtype=torch.int32, device="cuda").view(batch, -1) if page else None
    if page:
        table[2, 0], table[3, 0] = -1, places[0]
    lengths = torch.tensor([room - 1, 40, 5 if page else -9, 5 if page else room + 999], device="cuda")
    q, k, v = (torch.randn(batch, new, x, 64, device="cuda").bfloat16() for x in (8, 2, 2))
    before = memory.clone()
    o = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths.int(), block_table=table, causal=True
    )
    torch.cuda.synchronize()
    at = places[0] + (1 if not page else room // page + 40 // page), 40 % page if page else 40
    before[:, at[0], at[1] : at[1] + new] = torch.stack((k[1], v[1]))
    last = places[0] + (0 if not page else room // page - 1), places[1] - 1
    before[:, last[0], last[1]] = torch.stack((k[0, 0], v[0, 0]))
    assert torch.equal(memory, before)
    assert o[1].isfinite().all()


@pytest.mark.parametrize("queries", [0, 5])
@pytest.mark.parametrize("keys", [0, 5])
def test_a_call_without_rows_is_checked_as_one_with_rows(queries: int, keys: int) -> None:
    q, k = ones(queries, 4, 64), ones(keys, 4, 64)
    with pytest.raises(ValueError, match=ON_GPU):
        flash_attn_varlen_func(q, k, k, integers(0, queries), integers(0, keys))
    with pytest.raises(ValueError, match="head_dim"):
        flash_attn_varlen_func(q[..., :60], k[..., :60], k[..., :60], integers(0, queries), integers(0, keys))
