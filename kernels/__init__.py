"""The ladder, in order: each stage's id and the file that holds it. The only list of stages."""

import importlib
import os
from types import ModuleType

# Every kernel here targets Hopper. Named before the DSL is imported, so that a machine without a GPU, or with
# another one, compiles the same machine code.
os.environ["CUTE_DSL_ARCH"] = "sm_90a"

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
    "bwd1": "bwd1",
    "bwd2": "bwd2",
    "bwd3": "bwd3",
    "bwd4": "bwd4",
    "bwd4_det": "bwd4",
}


def load(stage_id: str) -> tuple[object, ModuleType]:
    """The `Stage` and the module of a stage. Raises ValueError for an id the ladder does not have."""
    if stage_id not in LADDER:
        raise ValueError(f"unknown stage {stage_id!r}; the ladder has {', '.join(LADDER)}")
    module = importlib.import_module(f"kernels.{LADDER[stage_id]}")
    return next(stage for stage in module.STAGES if stage.id == stage_id), module
