"""What a compiled kernel's host code checks before it launches: the library's fast path relies on it.

Its tensors are made up, addresses in the memory of a GPU that is not there: no call may get as far as CUDA,
which would fail with another error.
"""

import ctypes

import pytest
import torch
import tvm_ffi

from harness.inputs import hopper_gpu
from hopper_attention import launch
from hopper_attention.kernels import calls, calls_fp8
from hopper_attention.kernels.contract import Problem, Scratch
from hopper_attention.kernels.device.fp8 import quantized_shapes

pytestmark = pytest.mark.skipif(hopper_gpu(), reason="there is a GPU here, and nothing at these addresses")

ADDRESS = 0x7F0000000000
CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}
CODES[torch.float8_e4m3fn] = (10, 8)
CUDA, CPU = 2, 1


class Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class MadeUp:
    """A dense tensor of some shape and type on a GPU, as DLPack describes it."""

    def __init__(self, *shape: int, dtype: torch.dtype, **changes: object):
        strides = changes.pop("strides", torch.empty(shape, device="meta").stride())
        extents = [(ctypes.c_int64 * len(x))(*x) for x in (shape, strides)]
        fields = {"data": ADDRESS, "device_type": CUDA, "device_id": 0} | changes
        code, bits = CODES[dtype]
        given = {"ndim": len(shape), "code": code, "bits": bits, "lanes": 1, "byte_offset": 0}
        self.managed = Managed(Tensor(**fields, **given), None, None)
        self.managed.tensor.shape, self.managed.tensor.strides = extents

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.managed.tensor.device_type, self.managed.tensor.device_id

    def __dlpack__(self, **options: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


HALF, FP32 = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
ROWS, LSE = ((2, 4, 16, 64), HALF), ((2, 4, 16), FP32)
PROBLEM = Problem.square(2, 4, 16, 64, True)


def with_scratch(tensors: dict, scratch: Scratch) -> dict:
    return tensors | {x: (shape, {"dtype": getattr(torch, kind)}) for x, (shape, kind) in scratch.items()}


FORWARD = with_scratch(dict.fromkeys("qkvo", ROWS) | {"lse": LSE}, calls.forward_scratch(PROBLEM))
BACKWARD = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), ROWS) | {"lse": LSE}
BACKWARD = with_scratch(BACKWARD, calls.backward_scratch(PROBLEM.with_(direction="bwd"), False))


@pytest.fixture(scope="module")
def kernels() -> dict[str, launch.Kernel]:
    """Forward and backward, as a process loads them that did not compile them."""
    found = {}
    for stage_id, direction in (("k6", "fwd"), ("bwd4", "bwd")):
        problem = PROBLEM.with_(direction=direction)
        launch.compile_stage(stage_id, problem)
        launch._compiled.clear()
        found[stage_id] = launch.compile_stage(stage_id, problem)
    return found


def refused(kernel: launch.Kernel, tensors: dict, name: str, *shape: int, **changes: object) -> None:
    """One of the tensors is another one, and the launch refuses it."""
    usual, kind = tensors[name]
    given = tensors | {name: (shape or usual, kind | changes)}
    arguments = [MadeUp(*shape, **kind) for shape, kind in given.values()]
    with pytest.raises(ValueError, match=r"^(Mismatched|Misaligned|Invalid) "):
        kernel(*map(tvm_ffi.from_dlpack, arguments))


WRONG = {
    "dtype": {"dtype": torch.float16},
    "type": {"dtype": torch.int32},
    "device": {"device_type": CPU},
    "other GPU": {"device_id": 1},
    "address": {"data": ADDRESS + 8},
    "columns": {"strides": (4096, 1024, 1, 16)},
    "rows": {"strides": (4096, 1024, 68, 1)},
}


OF_Q, OF_KV = ("q", "o", "do", "dq"), ("k", "v", "dk", "dv")
BOTH = [("k6", FORWARD), ("bwd4", BACKWARD)]
every_stage = pytest.mark.parametrize(("stage_id", "tensors"), BOTH, ids=[x for x, _ in BOTH])


@every_stage
@pytest.mark.parametrize("wrong", WRONG)
def test_tensors_of_rows(stage_id: str, tensors: dict, wrong: str, kernels: dict) -> None:
    for name in {*tensors} & {*OF_Q, *OF_KV}:
        if name != "q" or wrong not in ("other GPU",):  # the others are to be where q is
            refused(kernels[stage_id], tensors, name, **WRONG[wrong])


@every_stage
def test_shapes(stage_id: str, tensors: dict, kernels: dict) -> None:
    """The first tensors of a kind, q and k, have heads and a length of their own."""
    for name in {*tensors} & {*OF_Q, *OF_KV, "lse"} - {"q"}:
        shape = tensors[name][0]
        others = [(3, *shape[1:]), shape[1:]]
        if name != "k":
            others += [(2, 3, *shape[2:]), (2, 4, 15, *shape[3:])]
        if name != "lse":
            others += [(*shape[:3], 128)]
        for other in others:
            refused(kernels[stage_id], tensors, name, *other)


@every_stage
def test_lse(stage_id: str, tensors: dict, kernels: dict) -> None:
    for changes in ({"dtype": torch.bfloat16}, {"device_type": CPU}, {"device_id": 1}):
        refused(kernels[stage_id], tensors, "lse", **changes)


# ---- in 8 bits --------------------------------------------------------------------------------------------

IN_FP8 = PROBLEM.with_(direction="fp8", kv_heads=2)
LEAST = Problem.square(1, 1, 1, 64, True, direction="fp8")
OF_Q, OF_KV = (2, 4, 16, 64), (2, 2, 16, 64)
E4M3 = {"dtype": torch.float8_e4m3fn}
ROWS_8, ROWS_16 = ({"q": (OF_Q, x), "k": (OF_KV, x), "v": (OF_KV, x)} for x in (E4M3, HALF))
CODED = with_scratch({}, quantized_shapes(IN_FP8))
O_AND_LSE = {"o": (OF_Q, HALF), "lse": LSE}
FOUND = {name: x for name, x in CODED.items() if name not in ("q8", "k8", "vt8")}
OPERANDS = {name: x for name, x in CODED.items() if name not in FOUND}
OF_HEADS = {f"{x}_descale": ((2, 2), FP32) for x in "qkv"}
SCRATCH, SIGNS, SCALE = calls_fp8.fp8_scratch(IN_FP8), {"signs": ((64,), FP32)}, {"scale": 0.125}
FP8_LAUNCHES = {  # name, what it is compiled for, options; arguments
    "codes": (
        "k7", LEAST, calls_fp8.BLOCK_SCALES,
        with_scratch(OPERANDS | O_AND_LSE, SCRATCH) | FOUND | SCALE,
    ),
    "rows": (
        "k7_rows", LEAST.with_(direction="fp8_rows"), {},
        with_scratch(ROWS_8 | O_AND_LSE, calls_fp8.of_rows(IN_FP8) | SCRATCH) | OF_HEADS | SCALE,
    ),
    "cast": (
        "k8", LEAST.with_(direction="fp8_cast"), {},
        with_scratch(ROWS_16 | O_AND_LSE, calls_fp8.of_cast(IN_FP8) | SCRATCH) | SIGNS | SCALE,
    ),
    "quantize": (
        "quantize", LEAST.with_(causal=False, direction="fp8_cast"),
        calls_fp8.quantize_options("qkv", True, False), ROWS_16 | CODED | SIGNS | {"cos": None, "sin": None},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FP8_LAUNCHES)
def in_fp8(request: pytest.FixtureRequest) -> tuple[launch.Kernel, dict]:
    *what, arguments = FP8_LAUNCHES[request.param]
    launch.kernel_for(*what)
    launch._compiled.clear()
    return launch.kernel_for(*what), arguments


def call_in_fp8(in_fp8: tuple[launch.Kernel, dict], **others: tuple[tuple[int, ...], dict]) -> None:
    kernel, arguments = in_fp8
    given = (arguments | others).values()
    made = [MadeUp(*x[0], **x[1]) if isinstance(x, tuple) else x for x in given]
    kernel(*(tvm_ffi.from_dlpack(x) if isinstance(x, MadeUp) else x for x in made))


def refused_in_fp8(in_fp8: tuple[launch.Kernel, dict], name: str, **changes: object) -> None:
    shape, kind = in_fp8[1][name]
    other = changes.pop("shape", shape), kind | changes
    with pytest.raises(ValueError, match=r"^(Mismatched|Misaligned|Invalid) "):
        call_in_fp8(in_fp8, **{name: other})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing at these addresses")
def test_fp8_launches_take_the_library_s_tensors(in_fp8: tuple[launch.Kernel, dict]) -> None:
    """One number as the scale of every head, and rows of more heads than there are, as of a cache."""
    others = {}
    for name, x in in_fp8[1].items():
        if isinstance(x, tuple) and name in ("q", "k", "v", "q8", "k8", "vt8", "o"):
            others[name] = x[0], x[1] | {"strides": (1 << 22, 1 << 16, 272, 1)}
        elif name in OF_HEADS:
            others[name] = x[0], x[1] | {"strides": (0, 0)}
    for changed in ({}, others):
        with pytest.raises(RuntimeError, match="CUDA"):
            call_in_fp8(in_fp8, **changed)


def test_fp8_launches_refuse_wrong_tensors(in_fp8: tuple[launch.Kernel, dict]) -> None:
    """Types, devices and addresses of all; no plan follows from them."""
    arguments = {name: x for name, x in in_fp8[1].items() if isinstance(x, tuple)}
    for name, (shape, kind) in arguments.items():
        other = torch.float16 if kind["dtype"] != torch.float16 else torch.float32
        refused_in_fp8(in_fp8, name, dtype=other)
        refused_in_fp8(in_fp8, name, device_type=CPU)
        if name != next(iter(arguments)):
            refused_in_fp8(in_fp8, name, device_id=1)
            refused_in_fp8(in_fp8, name, shape=shape[1:])
        if kind["dtype"] != torch.float32 and kind["dtype"] != torch.int32:
            refused_in_fp8(in_fp8, name, data=ADDRESS + 8)
            refused_in_fp8(in_fp8, name, strides=(1 << 20, 1 << 16, 1, 16))
        if name == "v":
            refused_in_fp8(in_fp8, name, shape=(2, 2, 15, 64))
        if name not in ("q8", "q", "flushed", "counter", "signs", "scales"):
            refused_in_fp8(in_fp8, name, shape=(3, *shape[1:]))
