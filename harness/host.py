"""What a call costs the host, ours beside PyTorch's `scaled_dot_product_attention`, in one run.

    python -m harness.host            measure and print
    python -m harness.host --save     and write results/<gpu>/library/host.json

Of each call the least mean of many rounds; calls take turns, so that all have the same clock.
"""

import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness import row_files, timing
from harness.command import run, saving
from hopper_attention import attention

SHAPES = ((1, 4, 64, 64), (1, 8, 1024, 64))  # batch, heads, seqlen, head_dim
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ROUNDS, CALLS = 30, 200
DEVICE = "cuda"
OURS, PLAIN = "attention", "SDPA"
FORWARD, BOTH = "forward", "forward and backward"


def least(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """µs of each call, in turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name] = min(found[name], timing.host_microseconds(call, CALLS, 1))
    return found


def of_backends(call: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """SDPA as it chooses by itself, and by its backends, which includes what asking for one costs."""

    def through(backend: SDPBackend) -> object:
        with sdpa_kernel(backend):
            return call()

    named = {f"{PLAIN}, {name}": lambda x=backend: through(x) for name, backend in BACKENDS.items()}
    return {PLAIN: call} | named


def measure(shape: tuple[int, ...]) -> list[dict[str, object]]:
    """Rows for one shape, causal, bf16: without gradients, and through autograd."""
    q, k, v, do = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = lambda call: torch.autograd.grad(call(*leaves), leaves, do)
    ours = lambda *x: attention(*x, causal=True)
    sdpa = lambda *x: scaled_dot_product_attention(*x, is_causal=True)
    with torch.no_grad():
        forward = least({OURS: lambda: ours(q, k, v)} | of_backends(lambda: sdpa(q, k, v)))
    both = least({OURS: lambda: gradients(ours)} | of_backends(lambda: gradients(sdpa)))
    return [
        {"shape": shape, "what": what, "provider": name, "us": round(us, 2)}
        for what, found in ((FORWARD, forward), (BOTH, both))
        for name, us in found.items()
    ]


def measured(arguments: list[str] | None) -> bool:
    save = saving("host", __doc__, arguments)
    rows = [row for shape in SHAPES for row in measure(shape)]
    for row in rows:
        print(f"{row['shape']!s:18} {row['what']:21} {row['provider']:12} {row['us']:7.2f} µs")
    if save:
        print(f"wrote {row_files.save('host', rows, timing.environment({}))}")
    return True


def main(arguments: list[str] | None = None) -> int:
    return run("harness.host", lambda: measured(arguments))


if __name__ == "__main__":
    sys.exit(main())
