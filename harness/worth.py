"""What single ideas of a finished kernel are worth: its measured variants that lack one, at N = 4096."""

from collections.abc import Mapping

from harness.markdown import table
from harness.results import Results
from hopper_attention.kernels import ladder

SEQLEN = 4096
# By kernel file: what a variant lacks, at which head_dim, and the variant's label among the file's VARIANTS.
LACKING = {
    "k6": (
        ("lazy rescaling (`exact`)", 128, "exact"),
        ("lazy rescaling", 64, "exact"),
        ("a tile in two parts", 64, "256×64, 8 stages"),
        ("three consumers and tiles of 64 keys: two, of 128 keys, instead", 128, "128×128, 2 stages"),
    ),
}


def block(file: str, ablations: Mapping[str, Results]) -> str:
    """A row for each idea: how much the kernel loses without it, full and causal. `ablations` by GPU, the one
    measured last first."""
    lines, gpu = [], ""
    results = next(iter(ablations.values()), None)
    variants = list(ladder.load(results.stage)[1].VARIANTS) if results else []
    for idea, head_dim, variant in LACKING[file]:
        cells = []
        for causal in (False, True):
            rows = [
                row
                for row in (results.rows if results else ())
                if (row.head_dim, row.causal, row.seqlen_q) == (head_dim, causal, SEQLEN) and row.tflops
            ]
            rates = {row.provider: row.tflops for row in rows}
            whole = next((label for label in variants if label in rates), None)
            known = whole is not None and variant in rates
            cells.append(
                f"{100 * (rates[variant] / rates[whole] - 1):+.0f} %".replace("-", "−")
                if known
                else "not measured"
            )
        lines.append([idea, str(head_dim), *cells])
        gpu = results.gpu if results else ""
    where = (
        f"The kernel without one of its ideas against the whole of it, N = {SEQLEN}, {gpu or 'not measured'}."
    )
    return f"{table(['without', 'head_dim', 'full', 'causal'], lines, 'lrrr')}\n\n{where}"
