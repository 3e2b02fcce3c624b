"""What a kernel file declares about itself, and the functions the harness calls in it.

A kernel file has `STAGES`, a tuple of `Stage`, and

- `supports(problem) -> str | None`: why its stages refuse the problem, the other direction included, or None.
  The harness raises the reason, after the stage's id, as a ValueError before anything is launched. A stage
  that takes unequal lengths computes both alignments of a causal mask (`Problem.top_left`) or refuses one; at
  equal lengths they are one mask, and need no telling apart.
- `workspace(problem, **options) -> {name: (shape, dtype)}`: scratch the harness allocates, by the rule in
  `harness.inputs.allocate` on what starts at zero.
- `compile_kernel(problem, **options) -> compiled`: needs no tensors and no GPU. Head_dim, mask and dtype are
  compiled in; batch, heads and lengths stay dynamic.
- `work(problem, **options) -> list[Work]`: what the launch does, kernel by kernel.
- `run_kernel(compiled, tensors)`: enqueues on PyTorch's current stream and writes `tensors.outputs` in place.
  No allocation and no synchronisation, so that a CUDA graph can capture it. Nothing is launched for empty
  outputs.

and may have

- `VARIANTS`, {label: options}: what `python -m harness.ablation` times side by side;
- `variants_for(problem) -> list[str]`: those of the labels that are candidates on a problem;
- `lazy_maximum(problem, **options) -> (tile_kv, parts, growth)`: for a forward kernel that rounds P relative
  to a maximum it brings up to date lazily (`ref_check.Rounding`).
"""

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
    direction: str = "fwd"  # or "bwd"
    model: str = "flash_attention_2"  # the function of harness.models that follows this kernel's algorithm
    # Whether P, and in a backward stage dS, are rounded to the input type before their products, as the
    # yardstick then does.
    rounds_p: bool = False
    atomics: bool = False  # float atomics: the order of additions, and so the last bits, differ between runs
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
