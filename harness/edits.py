"""Kernels with an edit of their source: an idea taken out that no option takes out.

A copy of kernels/ with the edits applied is a package of its own, so that the finished kernel and those that
lack something are compiled and run in one process.
"""

import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hopper_attention.cache import KERNELS
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import Kernel, kept

Edit = tuple[str, str, str]  # a file in kernels/, what stands there, and what shall
_number = itertools.count()


@dataclass(frozen=True)
class Lacking:
    """A kernel file without one of its ideas."""

    edits: tuple[Edit, ...]
    head_dims: tuple[int, ...] = (64, 128)  # where it has the idea
    masks: tuple[bool, ...] = (False, True)  # not causal, causal

    def concerns(self, problem: Problem) -> bool:
        return problem.head_dim in self.head_dims and problem.causal in self.masks


def _edits(file: str, *changes: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple((file, old, new) for old, new in changes)


_SCORES = """\
        if not final:
            rings.q.consumer_wait(q_next)
            self.scores(x, f, k_get, q_next)
"""
_IN_STEP = "        self.sync(Barrier.TURN, x."
_ALL_OF_DS_FIRST = ("self.own_first = head_dim == 128 and", "self.own_first = False and")
_FETCH = "tile = fetch(mCounter, tiles, own_first=False)\n"
# By kernel file, by what the variant is called.
LACKING: dict[str, dict[str, Lacking]] = {
    "bwd4": {
        "no turns": Lacking(
            _edits(
                "bwd4.py",
                (f"{_IN_STEP}index, BOTH)\n", ""),
                (f"{_IN_STEP}other, BOTH, arrive=True)\n", ""),
                _ALL_OF_DS_FIRST,  # without a turn nobody knows that a consumer's own dS is there
            )
        ),
        "dQ when all of dS is there": Lacking(
            _edits("bwd4.py", _ALL_OF_DS_FIRST), head_dims=(128,), masks=(False,)
        ),
        "exponentials when dPᵀ is done": Lacking(
            _edits(
                "bwd4.py",
                ("(f.D, stage)\n", f"(f.D, stage)\n{' ' * 12}warpgroup.wait_group(0)\n"),
            )
        ),
        "next Sᵀ when dQ has left": Lacking(
            _edits(
                "bwd4.py",
                (_SCORES, ""),
                ("wait_group(0 if final else 1)  # dQ", "wait_group(0)"),
                (
                    "arrive=True)\n        warpgroup.wait_group(0)\n",
                    f"arrive=True)\n{_SCORES}        warpgroup.wait_group(0)\n",
                ),
            )
        ),
        "dV with dK": Lacking(
            _edits("bwd4_operands.py", ("Config(TILE_Q[128], True", "Config(TILE_Q[128], False")),
            head_dims=(128,),
        ),
        "LSE and D subtracted by threads": Lacking(
            _edits("device/limits.py", ("return columns == 128 and not capped", "return False")),
            head_dims=(128,),
        ),
        "V in shared memory": Lacking(
            _edits("bwd4_operands.py", ("Config(TILE_Q[64], False, True", "Config(TILE_Q[64], False, False")),
            head_dims=(64,),
        ),
        "64 queries a step": Lacking(
            (
                *_edits("device/limits.py", ("TILE_Q = {64: 128,", "TILE_Q = {64: 64,")),
                # Otherwise in parts, for which the scratch of 64 columns has no room.
                *_edits("device/key_tiles.py", ("self.splits = undivided and", "self.splits = False and")),
                *_edits(
                    "bwd4_operands.py",
                    ("Config(TILE_Q[64], False, True", "Config(TILE_Q[64], True, False"),
                    # Half of dQ is then 32 columns, and K lies in tiles of as many.
                    (
                        "return 64 if head_dim == 64 else head_dim // CONSUMERS",
                        "return head_dim // CONSUMERS",
                    ),
                    ("return 32 if head_dim == 96 else None", "return {64: 64, 96: 32}.get(head_dim)"),
                ),
            ),
            head_dims=(64,),
        ),
        "every tile masked": Lacking(
            _edits(
                "device/key_tiles.py",
                ("max(first, split), last - 1, False", "max(first, split), last - 1, True"),
                ("yield first_masked, unmasked, False", "yield first_masked, unmasked, True"),
            )
        ),
        "a CTA a tile of keys": Lacking(
            (
                *_edits("device/key_tiles.py", ("return cutlass.min(tiles, ctas)", "return tiles")),
                *_edits(
                    "bwd4_loads.py",
                    (
                        f"        {_FETCH}        waited",
                        "        tile, _, _ = cute.arch.block_idx()\n        waited",
                    ),
                    (f"else:\n                {_FETCH}", "else:\n                tile = tiles\n"),
                ),
            )
        ),
        "one head after the other": Lacking(
            _edits(
                "device/key_tiles.py",
                ("by_section = mask.hides or deterministic", "by_section = deterministic"),
            ),
            masks=(True,),
        ),
        "all zeros before": Lacking(
            _edits(
                "device/dq_sums.py",
                ("return section, self.final(heads, section, (heads + 1) // 2)", "return heads, heads"),
            )
        ),
        "launches that do not overlap": Lacking(
            (
                *_edits("bwd4.py", ("use_pdl=True", "use_pdl=False")),
                *_edits(
                    "device/backward_ends.py", ("            use_pdl=True,\n", "            use_pdl=False,\n")
                ),
            )
        ),
    }
}


WHOLE = "the whole kernel"  # beside those that lack something


def labels(stage_id: str) -> list[str]:
    """What the variants of a stage's file are called in its ablation, the first one what the others are
    compared with; none where it has no variants."""
    if (name := ladder.FILES[stage_id]) in LACKING:
        return [WHOLE, *LACKING[name]]
    return list(getattr(ladder.load(stage_id)[1], "VARIANTS", {}))


def edited(file: str, *edits: Edit, folder: Path | None = None) -> ModuleType:
    """A kernel file of a copy of kernels/ with the edits. Raises ValueError where one has nothing to edit."""
    name = f"edited_kernels_{next(_number)}"
    copy = (folder or _temporary()) / name
    shutil.copytree(KERNELS, copy)
    for place, old, new in edits:
        source = (copy / place).read_text(encoding="utf-8")
        if old not in source:
            raise ValueError(f"kernels/{place} has changed: it has no {old!r}")
        (copy / place).write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(copy)]
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{name}.{file}")


@functools.cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def lacking(file: str, label: str) -> ModuleType:
    """A kernel file without an idea."""
    return edited(file, *LACKING[file][label].edits)


def compile_lacking(file: str, label: str, problem: Problem, **options: object) -> Kernel:
    """`launch.compile_kernel` of a kernel file without an idea; `problem` as `compiled_for` gives it."""
    what = {"problem": repr(problem), "options": repr(sorted(options.items()))}
    compile_now = lambda: lacking(file, label).compile_kernel(problem, **options)
    return kept(compile_now, file=file, edits=repr(LACKING[file][label].edits), **what)
