"""Hardware counters of one stage on one problem, by Nsight Compute.

    python -m harness.profile k2 --seqlen 4096 --head-dim 128 --causal 0 [--save FILE.json]

Prints a handful of metrics for each kernel of the stage. Needs a Hopper GPU and `ncu`.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

from hopper_attention.cache import write_atomically
from hopper_attention.kernels import ladder
from hopper_attention.launch import compile_kernel

# Nsight Compute's metric → what the notes call it. Percentages are of the unit's peak.
METRICS = {
    "gpu__time_duration.sum": "time, µs",
    "sm__cycles_elapsed.avg.per_second": "SM clock, MHz",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots, %",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "tensor pipe, %",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active": "FMA pipe, %",
    "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active": "ALU pipe, %",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "MUFU (XU) pipe, %",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "LSU pipe, %",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active": "L1 and shared data pipe, %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared-memory wavefronts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "shared-memory bank conflicts",
    "smsp__inst_executed_op_shared_ld.sum": "shared loads, warps",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "global-load sectors",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "global-load requests",
    "lts__t_bytes.sum": "L2 traffic, bytes",
    "dram__bytes.sum": "device-memory traffic, bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident, %",
    "smsp__average_warp_latency_issue_stalled_long_scoreboard.ratio": "stall, global load",
    "smsp__average_warp_latency_issue_stalled_short_scoreboard.ratio": "stall, shared load or MUFU",
    "smsp__average_warp_latency_issue_stalled_mio_throttle.ratio": "stall, shared-memory queue",
    "smsp__average_warp_latency_issue_stalled_lg_throttle.ratio": "stall, global-load queue",
    "smsp__average_warp_latency_issue_stalled_barrier.ratio": "stall, barrier",
    "smsp__average_warp_latency_issue_stalled_math_pipe_throttle.ratio": "stall, arithmetic pipe",
    "smsp__average_warp_latency_issue_stalled_not_selected.ratio": "stall, another warp chosen",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": "stall, WGMMA",
}


def refuse(stage_id: str, seqlen: int, head_dim: int, causal: bool) -> None:
    """Raise ValueError for what `launch` cannot run."""
    from harness import stages
    from harness.sweep import sweep_problem

    stage, _ = ladder.load(stage_id)
    if stage_id in ladder.BESIDE:
        raise ValueError(f"{stage_id} has other problems than the sweep's")
    stages.refuse(stage_id, sweep_problem(seqlen, head_dim, causal, stage.direction))


def launch(stage_id: str, seqlen: int, head_dim: int, causal: bool, options: dict[str, object]) -> None:
    """One launch, profiled, on the sweep's problem of this shape."""
    import torch

    from harness import judging
    from harness.inputs import random_inputs
    from harness.sweep import sweep_problem

    stage, module = ladder.load(stage_id)
    problem = sweep_problem(seqlen, head_dim, causal, stage.direction)
    options = stage.options | options
    compiled = compile_kernel(stage_id, problem, **options)
    q, k, v, *do = random_inputs(problem)
    tensors = judging.Expected(q, k, v, causal, *do).allocate(module, problem, **options)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    module.run_kernel(compiled, tensors)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile(arguments: list[str]) -> list[dict[str, object]]:
    """Run this module under ncu with `arguments`; one dict of METRICS' labels for each kernel launched.

    Raises RuntimeError when ncu is missing or fails. A metric this GPU does not have is left out.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if ncu is None:
        raise RuntimeError("ncu (Nsight Compute) is not installed")
    command = [
        ncu,
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--print-units",
        "base",
    ]
    command += [
        "--metrics",
        ",".join(METRICS),
        sys.executable,
        "-m",
        "harness.profile",
        *arguments,
        "--launch",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    table = run.stdout[run.stdout.find('"ID"') :]
    found: dict[str, dict[str, object]] = {}
    for line in csv.DictReader(io.StringIO(table)):
        value = line["Metric Value"].replace(",", "")
        if not value.replace(".", "").replace("e", "").replace("+", "").replace("-", "").isdigit():
            continue
        entry = found.setdefault(line["ID"], {"kernel": line["Kernel Name"][:100]})
        entry[METRICS[line["Metric Name"]]] = float(value)
    if run.returncode or not found:
        raise RuntimeError(f"ncu failed: {(run.stdout + run.stderr)[-2000:]}")
    for entry in found.values():
        entry["time, µs"] /= 1e3
        entry["SM clock, MHz"] /= 1e6
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", type=int, choices=(0, 1), default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: other arguments of the kernel")
    parser.add_argument("--save", type=Path, help="write the metrics as JSON")
    parser.add_argument("--launch", action="store_true", help="only launch; what ncu runs")
    args = parser.parse_args()
    if args.launch:
        launch(args.stage, args.seqlen, args.head_dim, bool(args.causal), args.options)
        return 0
    try:
        refuse(args.stage, args.seqlen, args.head_dim, bool(args.causal))
        shape = ["--seqlen", args.seqlen, "--head-dim", args.head_dim, "--causal", args.causal]
        metrics = profile([args.stage, *map(str, shape), "--options", json.dumps(args.options)])
    except (ValueError, RuntimeError) as error:
        print(f"harness.profile: {error}", file=sys.stderr)
        return 2
    for entry in metrics:
        print("\n".join(f"{name:32} {value}" for name, value in entry.items()) + "\n")
    if args.save:
        write_atomically(args.save, (json.dumps(metrics, indent=1, ensure_ascii=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
