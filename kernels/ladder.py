"""The ladder, in order: each stage's id and the file that holds it. The only list of stages."""

import importlib
from types import ModuleType
from typing import cast

from .contract import KernelFile, Stage

LADDER: dict[str, str] = {
    "k1": "k1",
    "fa1": "fa1",
    "k2": "k2",
    "k3_1": "k3",
    "k3_2": "k3",
    "k3_3": "k3",
    "k4_qk": "k4_qk",
    "k4": "k4",
    "k5": "k5",
    "k6_1": "k6_1",
    "k6_2": "k6_2",
    "k6": "k6",
    "k6_r192": "k6_rows",
    "k6_r128": "k6_rows",
    "k6_r64": "k6_rows",
    "k6_slices": "k6_slices",
    "k6_slices_r192": "k6_slices",
    "k6_slices_r64": "k6_slices",
    "k6_groups": "k6_groups",
    "k6_groups_r64": "k6_groups",
    "k7": "k7",
    "k7_rows": "k7_rows",
    "k8": "k8",
    "bwd1": "bwd1",
    "bwd2": "bwd2",
    "bwd3": "bwd3",
    "bwd4": "bwd4",
    "bwd4_det": "bwd4",
    "bwd4_parts": "bwd4_parts",
    "bwd4_parts_det": "bwd4_parts",
}

# Stages for up to 128 keys, which in the sweep are the shortest. All else is as of the others.
FEW_KEYS: dict[str, str] = {"bwd4_one": "bwd4_one", "bwd4_one_parts": "bwd4_one_parts"}
CHECKED = LADDER | FEW_KEYS

# Stages that have other problems than the ladder's, and so other peers and another judge: harness.decoding.
BESIDE: dict[str, str] = {"decode": "decode"}
FILES = CHECKED | BESIDE


def stages_named(names: list[str]) -> list[str]:
    """The stages that a user names: by id, by kernel file, whose stages they then are ("k3" is three), or
    "all". What is neither stays, for `load` to refuse."""
    if names == ["all"]:
        return list(CHECKED)
    of_file = lambda name: [stage_id for stage_id, file in CHECKED.items() if file == name]
    return [x for name in names for x in ([name] if name in CHECKED else of_file(name) or [name])]


def load(stage_id: str) -> tuple[Stage, KernelFile]:
    """The `Stage` and the kernel file of a stage.

    Raises ValueError for an id the ladder does not have, ModuleNotFoundError where there is no compiler.
    """
    if stage_id not in FILES:
        raise ValueError(f"unknown stage {stage_id!r}; the ladder has {', '.join(CHECKED)}")
    file = cast(KernelFile, load_file(FILES[stage_id]))
    return next(stage for stage in file.STAGES if stage.id == stage_id), file


def load_file(name: str) -> ModuleType:
    """A file of kernels, also one that holds no stage. Raises ModuleNotFoundError where there is no
    compiler."""
    try:
        return importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "cutlass":
            raise
        raise ModuleNotFoundError(
            "the kernels are compiled by NVIDIA's CuTe DSL: pip install 'nvidia-cutlass-dsl[cu13]'",
            name=error.name,
        ) from None
