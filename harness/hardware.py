"""The GPUs whose peak rates are known, and the roofline they set."""

from dataclasses import dataclass
from typing import Any

from hopper_attention.kernels.contract import Problem


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU; per-SM figures are per clock."""

    name: str
    sms: int
    clock_ghz: float
    hbm_bytes_per_s: float
    tensor_flops_per_clock: int = 4096  # dense bf16, per SM
    fp32_lanes: int = 128
    alu_lanes: int = 64
    mufu_lanes: int = 16
    issue_slots: int = 4
    smem_bytes_per_clock: int = 128

    @property
    def tensor_flops(self) -> float:
        """Dense bf16 FLOP/s of the whole chip."""
        return self.tensor_flops_per_clock * self.sms * self.clock_ghz * 1e9

    def roofline_seconds(self, problem: Problem) -> float:
        """The larger of FLOPs over the tensor-core rate and bytes over the memory rate, in seconds."""
        tensor_flops = self.tensor_flops * (2 if problem.in_fp8 else 1)
        return max(problem.flops / tensor_flops, problem.min_bytes / self.hbm_bytes_per_s)


def peak_of(properties: Any) -> dict[str, float] | None:
    """What a Hopper GPU's peak rates follow from, of CUDA's properties of the device as PyTorch has them:
    SMs, the SM clock's maximum, and what its memory moves, two bits a pin and clock. None where a PyTorch
    lacks one."""
    names = "multi_processor_count", "clock_rate", "memory_clock_rate", "memory_bus_width"
    sms, clock_khz, memory_khz, bits = (getattr(properties, name, None) for name in names)
    if not (sms and clock_khz and memory_khz and bits):
        return None
    return {"sms": sms, "clock_ghz": clock_khz / 1e6, "hbm_bytes_per_s": 2e3 * memory_khz * bits / 8}


# Rates per SM and clock: NVIDIA H100 white paper and the CUDA programming guide's throughput table for cc
# 9.0. 1.98 GHz is the SM clock's maximum, so that no kernel can be faster than its bound. NVIDIA quotes its
# 989 TFLOP/s at 1.83 GHz; a kernel that keeps the tensor cores busy settles below both, at the power cap.
# 3.35 TB/s is HBM3's peak.
H100_SXM = Gpu("NVIDIA H100 SXM", sms=132, clock_ghz=1.98, hbm_bytes_per_s=3.35e12)
# The same chip; 4.8 TB/s is the peak of its HBM3e (NVIDIA H200 datasheet).
H200_SXM = Gpu("NVIDIA H200 SXM", sms=132, clock_ghz=1.98, hbm_bytes_per_s=4.8e12)
