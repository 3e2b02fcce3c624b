"""FlashAttention-3's published figures, beside what its builds and our stages reach here."""

from collections.abc import Mapping

from harness.markdown import NOT_MEASURED, table
from harness.plots import format_rate
from harness.results import DIRECTION_WORDS, Results
from harness.sweep import SEQLENS, sweep_problem

# By (direction, head_dim, causal), TFLOP/s for N from 512 to 16384, read from the figures of arXiv
# 2407.08608: an H100 SXM5 with 80 GB, 16384 tokens and hidden size 2048, as here.
FLASH_ATTENTION_3 = {
    ("fwd", 64, False): (333, 392, 460, 476, 496, 497),
    ("fwd", 128, False): (467, 565, 625, 638, 646, 648),
    ("fwd", 128, True): (292, 423, 521, 579, 602, 616),
    ("fwd", 256, False): (482, 639, 707, 736, 746, 756),
    ("fwd", 256, True): (286, 427, 537, 612, 628, 642),
    ("bwd", 128, False): (316, 424, 501, 542, 559, 561),
    ("fp8", 64, False): (240, 396, 462, 568, 596, 613),
    ("fp8", 128, False): (348, 596, 733, 918, 974, 1008),
    ("fp8", 256, False): (510, 744, 931, 966, 1151, 1171),
}
OURS = {"fwd": "k6", "bwd": "bwd4", "fp8": "k7"}


def block(measured: Mapping[str, Results]) -> str:
    """A row for each published series: the paper's figure, FlashAttention-3 here, our stage here."""
    lines = []
    for (direction, head_dim, causal), figures in FLASH_ATTENTION_3.items():
        stage = OURS[direction]
        results = measured.get(stage)
        cells = []
        for n, figure in zip(SEQLENS, figures, strict=True):
            problem = sweep_problem(n, head_dim, causal, direction)
            rows = [results.find(provider, problem) if results else None for provider in ("fa3", stage)]
            here = [format_rate(row.tflops) if row is not None and row.tflops else "–" for row in rows]
            cells.append(f"{figure} / {here[0]} / **{here[1]}**")
        mask = "causal" if causal else "full"
        lines.append([f"{DIRECTION_WORDS[direction]}, {head_dim}, {mask}: `{stage}`", *cells])
    gpus = " and ".join(dict.fromkeys(measured[stage].gpu for stage in OURS.values() if stage in measured))
    header = ["head_dim", *map(str, SEQLENS)]
    words = (
        "In a cell, TFLOP/s: FlashAttention-3 as its paper has it (H100 SXM5, 2024), "
        f"FlashAttention-3 here, our stage here ({gpus or NOT_MEASURED}), these two in one run."
    )
    return f"{table(header, lines, 'l' + 'r' * len(SEQLENS))}\n\n{words}"
