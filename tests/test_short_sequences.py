"""Packed sequences of one tile of keys each: where their tiles and their scratch lie, on plain integers, what
scratch a call takes, and when the library asks for it."""

import itertools
import math
from types import SimpleNamespace

import pytest
from test_first_tiles import Integers
from untraced import kernels

from harness import policy_cases
from hopper_attention import selection
from hopper_attention.kernels import calls_one, division, ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import BACKWARD, DETERMINISTIC, IN_PARTS, ONE_TILE, ONE_TILE_IN_PARTS

bwd4_one = kernels("bwd4_one")
BATCHES = (
    ((64, 64),) * 5,
    ((0, 0), (1, 128), (0, 9), (203, 7), (128, 0), (129, 65), (0, 0)),
    ((700, 1), *(((3, 3),) * 40)),
    ((1, 1),),
)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 128])


def problem_of(sequences, head_dim: int = 64, **fields: object) -> Problem:
    queries, keys = (sum(x) for x in zip(*sequences))
    plain = {"causal": False, "direction": "bwd", "scaled": True, "sequences": tuple(sequences)}
    return Problem(1, 6, 3, queries, keys, head_dim, **plain | fields)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda x: f"{len(x)}")
@every_head_dim
def test_every_sequence_is_a_tile_of_each_key_head(head_dim: int, sequences) -> None:
    """Also one without keys: nobody else writes its queries' dQ. No two meet in scratch, or leave it."""
    problem = problem_of(sequences, head_dim)
    kernel = bwd4_one.kernel_for(problem).main
    at_q, at_kv = (Integers([0, *itertools.accumulate(n[side] for n in sequences)]) for side in (0, 1))
    lengths = at_q, at_kv, at_q, at_kv, 0, at_q[-1], at_kv[-1]  # nothing of `seqused` counts
    mK = SimpleNamespace(shape=(0, 0, problem.kv_heads, 1))
    tiles = kernel.most_tiles(lengths) * problem.kv_heads
    places = [tuple(map(int, kernel.place_of(tile, None, mK, lengths))) for tile in range(tiles)]
    assert all(len(place) == kernel.words for place in places)
    assert {place[:2] for place in places} == {(0, head) for head in range(problem.kv_heads)}
    expected = [(a, q, b, kv) for (q, kv), a, b in zip(sequences, at_q, at_kv)]
    assert [place[2:6] for place in places[:: problem.kv_heads]] == expected
    taken: set[int] = set()
    for _, _, _, seqlen_q, *_, begin, _ in places[:: problem.kv_heads]:
        own = set(range(begin, begin + math.ceil(seqlen_q / kernel.tile_q) * kernel.blocks))
        assert not taken & own
        taken |= own
    scratch = calls_one.one_tile_scratch(problem)
    assert max(taken) < scratch["stats"][0][1]


def test_nothing_is_listed_and_nothing_summed() -> None:
    scratch = calls_one.one_tile_scratch(problem_of(BATCHES[0]))
    assert list(scratch) == ["stats", "counter"]
    assert scratch == bwd4_one.workspace(problem_of(BATCHES[0]))


@every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
def test_who_runs_it(head_dim: int, deterministic: bool) -> None:
    """Whoever says that no sequence has more keys than a tile; not under other policies, nor where most
    queries see no key."""
    listed = DETERMINISTIC if deterministic else BACKWARD

    def stage(sequences=((64, 64),) * 300, short: bool = True, **fields: object) -> str:
        problem = problem_of(sequences, **{"head_dim": head_dim} | fields)
        found, parts = selection.backward_stage(problem, deterministic, short=short)
        assert parts is None
        return found

    assert stage() == stage(causal=True) == stage(lse_grad=True) == ONE_TILE
    assert stage(((300, 300),) * 9, short=False) == listed
    for policy in ({"window": (8, 0)}, {"softcap": 10.0}, {"sink": True}, {"head_dim": 256}):
        assert stage(**policy) not in (ONE_TILE, ONE_TILE_IN_PARTS)
    assert stage(((400, 100),) * 9, causal=True) != ONE_TILE == stage(((400, 100),) * 9)
    plain = Problem.square(1, 8, 4096, head_dim, False, direction="bwd")
    assert selection.backward_stage(plain, deterministic, short=True) == selection.backward_stage(
        plain, deterministic
    )


def test_what_it_refuses() -> None:
    supports = ladder.load(ONE_TILE)[1].supports
    assert supports(problem_of(((500, 128), (0, 0)))) is None
    assert supports(problem_of(((1, 129), (5, 5)))) == "takes up to 128 keys, one tile of them, not 129"
    for policy, name in (({"window": (8, 0)}, "a window"), ({"sink": True}, "a sink")):
        assert supports(problem_of(((5, 5),), **policy)) == f"does not take {name}"
    assert (
        ladder.load(ONE_TILE_IN_PARTS)[1].supports(problem_of(((5, 5),))) == "does not take packed sequences"
    )
    with pytest.raises(ValueError, match="what sees packed sequences is not divided"):
        bwd4_one.kernel_for(problem_of(((5, 5),)), divides=True)


def test_its_cases_are_those_of_packed_sequences() -> None:
    assert policy_cases.policies_of(ONE_TILE) == ["sequences"]
    assert policy_cases.policies_of(ONE_TILE_IN_PARTS) == policy_cases.policies_of(IN_PARTS) == []
    assert policy_cases.head_dims_of(ONE_TILE) == [64, 128]
    assert policy_cases.masks_of(ONE_TILE) == [{}, {"causal": True}]
    found = [problem for _, problem in policy_cases.packed(ONE_TILE)]
    assert len(found) > 30 and all(ladder.load(ONE_TILE)[1].supports(x) is None for x in found)
    longest = {max(keys for _, keys in x.sequences) for x in found}
    assert max(longest) == division.ONE_TILE_KEYS
