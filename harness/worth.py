"""What single ideas of a finished kernel are worth: its measured variants that lack one, at N = 4096."""

from collections.abc import Mapping

from harness import edits
from harness.markdown import NOT_MEASURED, table
from harness.results import Results

SEQLEN = 4096
BOTH = (128, 64)
# By kernel file: what a variant lacks, the variant's label in the file's ablation, and the head_dims that
# have the idea.
LACKING: dict[str, tuple[tuple[str, str, tuple[int, ...]], ...]] = {
    "k6": (
        ("lazy rescaling (`exact`)", "exact", BOTH),
        ("a tile in two parts", "256×64, 8 stages", (64,)),
        ("three consumers and tiles of 64 keys (two, of 128 keys, instead)", "128×128, 2 stages", (128,)),
    ),
    "bwd4": (
        ("128 queries a step (64 instead)", "64 queries a step", (64,)),
        ("turns", "no turns", BOTH),
        ("dQ leaves beside the next Sᵀ", "next Sᵀ when dQ has left", BOTH),
        ("dV before dPᵀ is waited for", "dV with dK", (128,)),
        ("exponentials beside dPᵀ", "exponentials when dPᵀ is done", BOTH),
        ("LSE and D subtracted by the tensor cores", "LSE and D subtracted by threads", (128,)),
        ("half of dQ before the other's dS is there", "dQ when all of dS is there", (128,)),
        ("sections of heads", "one head after the other", BOTH),
        ("persistent CTAs", "a CTA a tile of keys", BOTH),
        ("a loop without the mask", "every tile masked", BOTH),
        ("zeros written when needed", "all zeros before", BOTH),
        ("V in registers", "V in shared memory", (64,)),
    ),
}


def block(file: str, ablations: Mapping[str, Results]) -> str:
    """A row for each idea: how much the kernel loses without it. `ablations` by GPU, in the
    order of `report.load_ladder`."""
    results = next(iter(ablations.values()), None)
    columns = [(head_dim, causal) for head_dim in BOTH for causal in (False, True)]
    lines = [
        [idea, *(_change(results, label, *column) if column[0] in head_dims else "" for column in columns)]
        for idea, label, head_dims in LACKING[file]
    ]
    header = ["without", *(f"d = {d}, {'causal' if causal else 'full'}" for d, causal in columns)]
    gpu = results.gpu if results else NOT_MEASURED
    where = f"The kernel without one of its ideas against the whole, N = {SEQLEN}, {gpu}; minus: slower."
    return f"{table(header, lines, 'lrrrr')}\n\n{where}"


def _change(results: Results | None, label: str, head_dim: int, causal: bool) -> str:
    """Of a variant's rate against that of the whole, in per cent; nothing where there is no such variant."""
    if results is None:
        return NOT_MEASURED
    rows = [
        row
        for row in results.rows
        if (row.head_dim, row.causal, row.seqlen_q) == (head_dim, causal, SEQLEN) and row.tflops
    ]
    rates = {row.provider: row.tflops for row in rows}
    whole = next((x for x in edits.labels(results.stage) if x in rates), None)
    if whole is None:
        return NOT_MEASURED
    if label not in rates:  # an idea about one mask
        return ""
    change = 100 * (rates[label] / rates[whole] - 1)
    return f"{change:+.{int(abs(change) < 9.95)}f} %".replace("-", "−")
