"""One tile of keys: what is visited, what scratch there is, who runs it, and how the postprocess of what is
in parts shares out its CTAs. The kernels' own arithmetic on plain integers."""

import math
from types import SimpleNamespace

import pytest
from untraced import kernels

from hopper_attention import selection
from hopper_attention.kernels import calls, division
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import DETERMINISTIC, IN_PARTS, ONE_TILE, ONE_TILE_IN_PARTS

bwd4_one, key_parts = kernels("bwd4_one"), kernels("device.key_parts")
MASKS = ((False, False), (True, False), (True, True))
QUERIES, KEYS = (1, 63, 64, 65, 128, 129, 203, 640, 1025), (1, 49, 64, 77, 127, 128)
every_mask = pytest.mark.parametrize(("causal", "top_left"), MASKS)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 96, 128])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has nobody to tell that its numbers are everyone's."""
    monkeypatch.setattr("cutlass.cute.arch.make_warp_uniform", int)


def of(head_dim: int, **fields: object) -> Problem:
    return Problem(**{"batch": 1, "heads": 1, "kv_heads": 1, "direction": "bwd"} | fields, head_dim=head_dim)


def problems(head_dim: int, causal: bool, top_left: bool) -> list[Problem]:
    mask = {"causal": causal, "top_left": top_left}
    return [of(head_dim, seqlen_q=n, seqlen_kv=m, **mask) for n in QUERIES for m in KEYS]


def sees(problem: Problem, query: int, key: int) -> bool:
    offset = 0 if problem.top_left else problem.seqlen_kv - problem.seqlen_q
    return key < problem.seqlen_kv and (not problem.causal or key <= query + offset)


@every_mask
@every_head_dim
def test_every_tile_of_queries_is_visited_once(head_dim: int, causal: bool, top_left: bool) -> None:
    """Also where it sees no key: its dQ, zero, is written by nobody else. What is not masked is seen."""
    for problem in problems(head_dim, causal, top_left):
        for parts in (1, 2, 3):
            kernel = bwd4_one.kernel_for(problem, divides=parts > 1).main
            lengths = problem.seqlen_q, problem.seqlen_kv
            kernel.count_parts(None, SimpleNamespace(shape=(0, 0, 0, 0, parts)))
            visited = []
            for part in range(parts):
                place = 0, 0, 0, *((part,) if parts > 1 else ())
                tiles = list(map(int, kernel.work_on(place, *lengths)))
                first, last = tiles[0], tiles[-1]
                runs = [(int(begin), int(end), masked) for begin, end, masked in kernel.runs(*tiles)]
                inside = [i for begin, end, _ in runs for i in range(begin, end)]
                assert inside == list(range(first, last - 1))
                visited += [kernel.of_part(i, place) for i in range(first, last)]
                inside = [i for begin, end, masked in runs for i in range(begin, end) if not masked]
                whole = [kernel.of_part(i, place) for i in inside]
                for query in (x for i in whole for x in (i * kernel.tile_q, (i + 1) * kernel.tile_q - 1)):
                    assert all(sees(problem, query, key) for key in (0, kernel.tile_kv - 1))
            assert sorted(visited) == list(range(math.ceil(problem.seqlen_q / kernel.tile_q)))


@every_mask
@every_head_dim
def test_work_counts_the_tiles_that_are_visited(head_dim: int, causal: bool, top_left: bool) -> None:
    for problem in problems(head_dim, causal, top_left):
        (work,) = bwd4_one.work(problem)
        tile_q = bwd4_one.kernel_for(problem).main.tile_q
        assert sum(work.trips) == math.ceil(problem.seqlen_q / tile_q) - 1


@pytest.mark.parametrize("parts", [None, calls.Parts(1, 3)])
def test_there_is_no_sum_of_dq(parts: calls.Parts | None) -> None:
    problem = of(64, batch=2, heads=8, kv_heads=4, seqlen_q=1000, seqlen_kv=77, causal=False)
    scratch = calls.backward_scratch(problem, False, parts, one_tile=True)
    assert list(scratch) == ["stats", *["parts"] * (parts is not None), "counter"]
    assert scratch["stats"][0] == (16, 16, 2, 64)  # whole tiles of 128 queries
    assert scratch["counter"] == ((1,), "int32")


@every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
def test_who_runs_it(head_dim: int, deterministic: bool) -> None:
    def stage(**fields: object) -> str:
        problem = of(head_dim, **{"heads": 512, "kv_heads": 512, "causal": False} | fields)
        return selection.backward_stage(problem, deterministic)[0]

    lengths = {"seqlen_q": 256, "seqlen_kv": 128}
    assert stage(**lengths) == stage(**lengths, causal=True) == ONE_TILE
    assert stage(**lengths, scaled=True, lse_grad=True) == ONE_TILE
    assert stage(seqlen_q=4096, seqlen_kv=77, heads=8, kv_heads=8) == ONE_TILE_IN_PARTS
    assert stage(seqlen_q=256, seqlen_kv=129) not in (ONE_TILE, ONE_TILE_IN_PARTS)
    for policy in ({"window": (8, 0)}, {"softcap": 10.0}, {"sink": True}):
        if head_dim != 96:  # of which policies have no kernel
            assert stage(**lengths, scaled=True, **policy) == DETERMINISTIC
    blind = {
        "seqlen_q": 129,
        "seqlen_kv": 32,
        "causal": True,
    }  # under a mask of which most queries see nothing
    assert stage(**blind) == DETERMINISTIC and stage(**blind, top_left=True) == ONE_TILE
    assert stage(**blind | {"seqlen_q": 96}) == stage(**blind | {"causal": False}) == ONE_TILE
    wide = of(256, seqlen_q=4096, seqlen_kv=77, causal=False)
    assert selection.backward_stage(wide, deterministic)[0] == (DETERMINISTIC if deterministic else IN_PARTS)


def test_ways_that_are_tried() -> None:
    """`parts_to_try` divides wherever that is possible, as `parts_of` does where it pays."""
    few = of(64, heads=8, kv_heads=8, seqlen_q=4096, seqlen_kv=77, causal=False)
    assert division.parts_to_try(few) == division.parts_of(few) != calls.UNDIVIDED
    many = few.with_(batch=66, heads=16)
    assert division.parts_of(many) == calls.UNDIVIDED != division.parts_to_try(many)
    alone = many.with_(seqlen_q=64)
    assert division.parts_to_try(alone.with_(heads=8)) == calls.UNDIVIDED


@pytest.mark.parametrize(("seqlen", "heads", "batches"), [(1, 1, 1), (64, 3, 2), (65, 2, 3), (1000, 5, 4)])
def test_the_postprocess_of_parts_takes_each_block_once(seqlen: int, heads: int, batches: int) -> None:
    """From the last one back; its row of scratch is the head's, of all batches."""
    like = SimpleNamespace(shape=(seqlen, 64, heads, batches))
    blocks = math.ceil(seqlen / 64)
    found = [key_parts.place_from_last(cta, like) for cta in range(blocks * heads * batches)]
    every = [((block, head, b), b * heads + head) for b in range(batches) for head in range(heads)
             for block in range(blocks)]  # fmt: skip
    assert [(tuple(map(int, place)), int(row)) for place, row in found] == every[::-1]
