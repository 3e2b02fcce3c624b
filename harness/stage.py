"""What a kernel file declares about itself."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder: identity, what it adds, and what the harness must know to judge it.

    `options` are the keyword arguments of the kernel file's `compile_kernel` that make this stage; the same
    file may serve several stages, and an ablation is the same call with other options.
    """

    id: str
    title: str
    adds: str
    before: str | None
    direction: str = "fwd"
    model: str = "flash_attention_2"  # the function of harness.models that follows this kernel's algorithm
    rounds_p: bool = False  # whether P is rounded to the input type before P·V, as the yardstick then does
    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """How often one kernel runs its main loop on a problem: the link from machine code to a hardware bound.

    What one pass of the loop costs is read from the disassembly, which does not know how often a loop inside
    the main loop runs: `trips` names that for each innermost loop, in program order. `ffma` is the number of
    products a thread forms on CUDA cores in one pass; the disassembly must show as many, or `trips` is wrong.
    """

    kernel: str  # substring of the kernel's symbol
    unit: str  # what one pass computes, in words
    threads: int  # of a CTA
    ctas: int  # of the launch
    passes: int  # of the main loop, over all CTAs
    trips: tuple[float, ...]  # a mean where passes differ
    ffma: int
    hbm_bytes: float  # least device-memory traffic of one pass
    smem_bytes: int = 0  # dynamic shared memory of a CTA
    tensor_flops: float = 0  # of a CTA on tensor cores in one pass
