"""What FlashInfer is given, and what of a peer's output is taken for ours; a stand-in computes attention from
its arguments."""

from types import SimpleNamespace

import pytest
import torch

from harness import flashinfer_peer
from harness.decoding_timing import AGREE_E4M3, check_agreement

LENGTHS, PAGE, HEADS, KV_HEADS, HEAD_DIM = [130, 64, 7], 64, 4, 2, 32


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Of one sequence: q (queries, heads, head_dim), keys and values (keys, kv heads, head_dim), `seen`
    (queries, keys)."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", q, keys) * HEAD_DIM**-0.5
    return torch.einsum("hqn,nhd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def causal(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class Planned:
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: object) -> None:
        assert (workspace, layout) == ("planned", "NHD") and options["use_tensor_cores"]

    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page, *, q_len_per_req, **kinds) -> None:
        assert (heads, kv_heads, head_dim, page) == (HEADS, KV_HEADS, HEAD_DIM, PAGE)
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        self.plan_of = indptr.tolist(), indices.long(), last.tolist(), q_len_per_req

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        indptr, indices, last, queries = self.plan_of
        for b, end in enumerate(last):
            own = indices[indptr[b] : indptr[b + 1]]
            n = PAGE * (len(own) - 1) + end
            keys, values = (x[own].flatten(0, 1)[:n] for x in pages)
            rows = slice(b * queries, (b + 1) * queries)
            out[rows] = attention(q[rows], keys, values, causal(queries, n))


def xqa(q, pages, workspace, table, lengths, most, *, bmm1_scale, out, q_len_per_req, mask=None) -> None:
    assert workspace == "xqa" and most == max(LENGTHS) and bmm1_scale == HEAD_DIM**-0.5
    assert lengths.dtype == torch.uint32 and out.shape[0] == len(LENGTHS)
    for b, n in enumerate(lengths.tolist()):
        keys, values = (x[table[b].long()].flatten(0, 1)[:n] for x in pages)
        seen = torch.ones(q_len_per_req, n, dtype=torch.bool)
        if mask is not None:  # of the new keys, 16 a word
            j = torch.arange(q_len_per_req)
            bits = mask[b].int()[:, j // 16] >> j % 16 & 1
            seen[:, n - q_len_per_req :] = bits.bool()
        rows = slice(b * q_len_per_req, (b + 1) * q_len_per_req)
        out.view(-1, HEADS, HEAD_DIM)[rows] = attention(q[rows], keys, values, seen)


@pytest.mark.parametrize("way", ["planned", "xqa"])
@pytest.mark.parametrize("queries", [1, 5])
def test_it_is_given_the_problem(way: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Planned,
        decode=SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa),
    )
    monkeypatch.setattr(flashinfer_peer, "package", lambda: package)
    monkeypatch.setattr(flashinfer_peer, "workspace", lambda way: way)
    torch.manual_seed(0)
    q = torch.randn(len(LENGTHS), queries, HEADS, HEAD_DIM)
    pages = [torch.randn(9, PAGE, KV_HEADS, HEAD_DIM) for _ in "kv"]
    table = torch.randperm(9).int().view(3, 3)
    [call] = getattr(flashinfer_peer, way)(q, [pages], table, LENGTHS)
    expected = torch.empty_like(q)
    for b, n in enumerate(LENGTHS):
        keys, values = (x[table[b].long()].flatten(0, 1)[:n] for x in pages)
        expected[b] = attention(q[b], keys, values, causal(queries, n))
    torch.testing.assert_close(call(), expected)


def test_where_it_is_not_installed() -> None:
    with pytest.raises(ImportError):
        flashinfer_peer.version()


def test_agreement() -> None:
    expected = torch.tensor([1.0, -2.0, 0.5])
    check_agreement(expected + 0.03, expected)
    check_agreement([expected + 0.03, None], expected)
    check_agreement(expected + 0.15, expected, AGREE_E4M3)
    for wrong in (expected + 0.05, expected * torch.nan, -expected):
        with pytest.raises(RuntimeError, match="off by"):
            check_agreement(wrong, expected)
