"""The notes: links lead somewhere, quoted code is in the kernels, arithmetic is right, first layers are read
in five minutes."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from untraced import kernels

from harness import diff, edits, worth
from harness.hardware import H100_SXM
from harness.results import Results, repository
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.fp8 import E4M3_MAX

ROOT = repository()
NOTES = sorted((ROOT / "notes").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *NOTES]
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
WORDS_IN_FIVE_MINUTES = 900


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """The names GitHub gives to a document's headings."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.*)$", without_code(path.read_text(encoding="utf-8")), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        seen = found.get(name, 0)
        found[name] = seen + 1
        names.add(f"{name}-{seen}" if seen else name)
    return names


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", without_code(path.read_text(encoding="utf-8")))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    wrong = []
    for link in links:
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        place = (path.parent / target).resolve() if target else path
        if not place.exists() or (anchor and anchor not in anchors(place)):
            wrong.append(link)
    assert wrong == []


@every_document
def test_formulas_are_what_github_renders(path: Path) -> None:
    """A dollar beside a letter or a digit opens nothing there, and an escaped comma loses its backslash."""
    text = re.sub(r"`[^`\n]*`", "", without_code(path.read_text(encoding="utf-8")))
    displayed = re.findall(r"\$\$.*?\$\$", text, re.S)
    inline = list(re.finditer(r"(.?)(\$[^$\n]+\$)(.?)", re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)))
    glued = [m.group(0) for m in inline if m.group(1).isalnum() or m.group(3).isalnum()]
    escaped = [x for x in (*displayed, *(m.group(2) for m in inline)) if re.search(r"\\[,;:%{}]", x)]
    assert (glued, escaped) == ([], [])


@pytest.mark.parametrize(
    "name",
    ["k6", "k7", "k8", "decode", "bwd4", "context_parallel", "k6_policies", "bwd4_policies", "library"],
)
def test_the_first_layer_takes_five_minutes(name: str) -> None:
    text = (ROOT / "notes" / f"{name}.md").read_text(encoding="utf-8")
    first, details = re.sub(r"<!--.*?-->", "", text).split("\n## Details\n")
    assert len([word for word in first.split() if re.search(r"\w", word)]) <= WORDS_IN_FIVE_MINUTES
    if name in ("k6", "k7", "decode", "bwd4"):  # before the first page of text
        assert re.search(r"!\[[^\]]+\]\(drawings/", first.split("\n## ")[0])
    assert details


def test_the_readme_takes_five_minutes() -> None:
    """Without its generated tables, and the code to copy."""
    text = re.sub(
        r"<!-- results:begin (\S+) -->.*?<!-- results:end \1 -->",
        "",
        DOCUMENTS[0].read_text("utf-8"),
        flags=re.S,
    )
    read = re.sub(r"^!\[.*$|\]\([^)]*\)", "]", without_code(text), flags=re.M)
    assert len([word for word in read.split() if re.search(r"\w", word)]) <= 1000


def test_quoted_code_is_in_the_kernels() -> None:
    """But for comments at the end of a line."""
    code = lambda line: line.partition("  # ")[0].strip()
    lines = {
        code(line)
        for path in (ROOT / "kernels").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
    }
    text = (ROOT / "notes" / "cute.md").read_text(encoding="utf-8")
    quoted = [code(line) for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
              for line in block.splitlines()]  # fmt: skip
    assert len(quoted) > 25
    assert [line for line in quoted if line and line not in lines] == []


def test_what_a_stage_changes_is_counted() -> None:
    """The notes' lines added and removed are those that `python -m harness.diff` counts today."""
    said = r"`python -m harness\.diff (\w+) (\w+)`[^.`]*?(\d+) lines of code added, (\d+) removed"
    found = [match for path in NOTES for match in re.findall(said, path.read_text("utf-8"))]
    assert len(found) >= 6
    assert [x for x in found if diff.difference(*x[:2])[1:] != (int(x[2]), int(x[3]))] == []


# mathematics.md


def test_the_machine_in_the_mathematics() -> None:
    text = (ROOT / "notes" / "mathematics.md").read_text(encoding="utf-8")
    gpu = H100_SXM
    clock = gpu.clock_ghz * 1e9
    tflops, bandwidth = gpu.tensor_flops / 1e12, gpu.hbm_bytes_per_s / 1e12
    n, d = 4096, 128
    head = 4 * n * n * d
    said = [
        f"{tflops:.0f} / {bandwidth:.2f} = {tflops / bandwidth:.0f}$",
        f"or {head / gpu.tensor_flops * 1e6:.1f} µs of the whole chip",
        f"| {gpu.sms * 128 * 2 * clock / 1e12:.0f} TFLOP/s |",
        f"| {gpu.sms * 16 * clock / 1e12:.1f} T results/s |",
        f"{gpu.sms * 128 * clock / 1e12:.1f} TB/s",
        f"{100 * 797 / tflops:.0f} % of {tflops:.0f}",
    ]
    naive = head / (16 * n * n + 8 * n * d)
    said += [f"{naive * bandwidth:.0f} TFLOP/s at most"]
    for rows in (64, 128, 192):
        need = tflops / rows
        said.append(f"| {rows} | {head / rows / 1e6:.0f} MB | {need:.1f} TB/s | {4096 / rows:.0f} bytes |")
    for rows, measured in ((128, "4.43"), (192, "3.09")):
        traffic = 64 * (math.ceil(n / rows) * 4 * n * d + 4 * n * d) / 1e9
        assert f"{traffic:.2f}" == measured
        said.append(f"{measured} GB" if rows == 128 else f"it should be {measured}")
    assert [words for words in said if words not in text] == []


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Through e4m3, with one scale for the tensor."""
    scale = E4M3_MAX / x.abs().max()
    return (x * scale).to(torch.float8_e4m3fn).to(torch.float64) / scale


def test_the_error_budget_of_fp8() -> None:
    """The last column of mathematics.md's table, and the rounding that its predictions start from."""
    torch.manual_seed(0)
    x = torch.randn(10**6, dtype=torch.float64)
    rms = lambda error, of: (error.pow(2).mean() / of.pow(2).mean()).sqrt().item()
    assert rms(x.to(torch.float8_e4m3fn).to(torch.float64) - x, x) == pytest.approx(0.0266, abs=2e-4)
    q, k, v = (torch.randn(n, 128, dtype=torch.float64) for n in (256, 4096, 4096))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds_p: bool = False) -> torch.Tensor:
        s = q @ k.T / math.sqrt(128)
        p = torch.exp(s - s.amax(1, keepdim=True)) * 64
        p = p.to(torch.float8_e4m3fn).to(torch.float64) if rounds_p else p
        return p @ v / p.sum(1, keepdim=True)

    exact = attention(q, k, v)
    found = {
        "Q and K": attention(rounded(q), rounded(k), v),
        "V": attention(q, k, rounded(v)),
        "P": attention(q, k, v, rounds_p=True),
        "together": attention(rounded(q), rounded(k), rounded(v), rounds_p=True),
    }
    text = (ROOT / "notes" / "mathematics.md").read_text(encoding="utf-8")
    for source, o in found.items():
        (said,) = re.findall(rf"^\| {source} \|.*\| ([\d.]+) % \|$", text, re.M)
        assert 100 * rms(o - exact, exact) == pytest.approx(float(said), abs=0.06)


# The production kernels' tables


@pytest.mark.parametrize(("stage", "direction"), [("k6", "fwd"), ("k7", "fp8")])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_a_forward_kernel_takes(stage: str, direction: str, head_dim: int) -> None:
    module = kernels(stage)
    problem = Problem.square(1, 1, 1024, head_dim, False, direction=direction)
    if stage == "k6":
        kernel = module.kernel_for(problem)
    else:
        kernel = module.FP8Forward(head_dim, kernels("device.masks").Full(), problem.dtype)
    text = (ROOT / "notes" / f"{stage}.md").read_text(encoding="utf-8")
    parts = ", in two parts" if stage == "k6" and kernel.config.parts == 2 else ""
    fewer, more = kernel.config.registers
    row = (
        f"| {head_dim} | {kernel.tile_q} × {kernel.tile_kv}{parts} | {kernel.stages} | {kernel.threads} | "
        f"{fewer}, {more} | {kernel.smem_bytes / 1024:.1f} KiB |"
    )
    assert row in text


def test_what_is_taken_out_of_a_kernel_is_one_of_its_variants() -> None:
    for file, lacking in worth.LACKING.items():
        assert {label for _, label, _ in lacking} <= set(edits.labels(file))


@pytest.mark.parametrize(
    ("file", "idea", "label", "whole"),
    [
        ("k6", "lazy rescaling (`exact`)", "exact", "192×64, 4 stages"),
        ("bwd4", "turns", "no turns", edits.WHOLE),
    ],
)
def test_the_worth_of_an_idea_is_the_ratio_of_two_rows(file: str, idea: str, label: str, whole: str) -> None:
    results = Results.load(ROOT / "results" / "h200" / "ablations" / f"{file}.json")
    rates = {row.provider: row.tflops for row in results.rows
             if (row.head_dim, row.causal, row.seqlen_q) == (128, False, worth.SEQLEN)}  # fmt: skip
    change = 100 * (rates[label] / rates[whole] - 1)
    assert f"| {idea} | {change:+.{int(change > -9.95)}f} % ".replace("-", "−") in worth.block(
        file, {"": results}
    )
    assert "| not measured | not measured |" in worth.block(file, {})


def test_every_idea_is_still_in_its_kernel() -> None:
    """What an ablation takes out by an edit stands once in the source that it edits."""
    for file, ideas in edits.LACKING.items():
        for label, lacking in ideas.items():
            for place, old, new in lacking.edits:
                source = (ROOT / "kernels" / place).read_text(encoding="utf-8")
                assert source.count(old) == 1 and source.replace(old, new) != source, (
                    file,
                    label,
                    place,
                    old,
                )


# Profiles

COLUMNS = re.compile(r"^`?(k\d(?:_\w+?)?|fa1|bwd\d)`?(?:, d = (\d+))?$")
UNITS = {"time, ms": ("time, µs", 1e3), "L2 traffic, GB": ("L2 traffic, bytes", 1e9),
         "device-memory traffic, GB": ("device-memory traffic, bytes", 1e9)}  # fmt: skip


def profile_tables() -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """(note, GPU's folder, stage, (counter, value as written)) of each column that is headed by a stage's
    name. The GPU is that of the last link to a profile before the table; without one, the H100."""
    found = []
    for path in NOTES:
        text = path.read_text(encoding="utf-8")
        for place in re.finditer(r"(?:^\|.*\|\n)+", text, re.M):
            table = place[0]
            links = re.findall(r"results/([\w-]+)/profiles/", text[: place.start()].rpartition("\n#")[2])
            head, _, *rows = [[cell.strip().strip("*") for cell in line.strip("|\n").split("|")]
                              for line in table.splitlines()]  # fmt: skip
            if not any(row[0] == "issue slots, %" for row in rows):
                continue
            for at, name in enumerate(head[1:], 1):
                if match := COLUMNS.match(name):
                    stage = match[1] + (f"_d{match[2]}" if match[2] not in (None, "128") else "")
                    gpu = links[-1] if links else "h100-80gb-hbm3"
                    found.append((path.name, gpu, stage, [(row[0], row[at]) for row in rows]))
    return found


def test_profile_tables_are_the_profiles() -> None:
    """As Nsight Compute's files have them, of the kernel that takes longest."""
    tables, compared, wrong = profile_tables(), 0, []
    noted = {note for note, *_ in tables}
    assert noted >= {"k3.md", "k4.md", "k5.md", "k6.md", "k6_2.md", "bwd3.md", "bwd4.md"}
    for note, gpu, stage, rows in tables:
        path = ROOT / "results" / gpu / "profiles" / f"{stage}.json"
        longest = max(json.loads(path.read_text("utf-8")), key=lambda kernel: kernel["time, µs"])
        for counter, said in rows:
            name, unit = UNITS.get(counter, (counter, 1.0))
            if name in longest and re.fullmatch(r"[\d.,]+", said):
                decimals = len(said.partition(".")[2])
                compared += 1
                if abs(float(said.replace(",", "")) - longest[name] / unit) > 0.501 * 10**-decimals:
                    wrong.append((note, stage, counter, said, longest[name] / unit))
    assert wrong == []
    assert compared > 60
