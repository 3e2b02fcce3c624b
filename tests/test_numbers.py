"""No measured number without its source: in the README and in the first layers of the production notes a
rate, a time, a share or a ratio is in a table that results/ generates, or its paragraph has a date or leads
to a log; in the notes beside them it is in a table, or its section or the note's head has a date."""

import re
from pathlib import Path

import pytest

from harness.results import repository

ROOT = repository()
DOCUMENTS = ["README.md", *(f"notes/{name}.md" for name in ("k6", "bwd4", "k7", "decode"))]
LADDER = ("k1", "fa1", "k2", "k3", "k4_qk", "k4", "k5", "k6_1", "k6_2", "bwd1", "bwd2", "bwd3")
OTHERS = ("k6_rows", "k6_policies", "k7_rows", "k8", "head_dims", "bwd4_256", "bwd4_policies", "bwd4_zeros",
          "context_parallel", "library")  # fmt: skip
GENERATED = re.compile(r"<!-- results:begin (\S+) -->.*?<!-- results:end \1 -->", re.S)
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?"
JOINED = r"(?:\s*(?:to|and|or|of|for|our|,|–|−|→|/)\s*)+"
UNIT = r"(?:TFLOP/s|TB/s|GB/s|µs|ms\b|%|×(?! ?\d)|times\b)"
MEASURED = re.compile(rf"(?<![\w.]){NUMBER}(?:{JOINED}{NUMBER})*\s*{UNIT}")
RATIO = re.compile(r"(?<![\w.])\d\.\d{2,3}(?![\w.]| GHz| TB/s)")  # also without a unit
TRACED = re.compile(r"\b20\d\d-\d\d-\d\d\b|\]\([^)]*_log\.md[^)]*\)")
# In a note's head: of when all is that its text says, unless told otherwise.
OF_ONE_DAY = re.compile(r"(?:figures|rates)(?: in the text)? are .*20\d\d-\d\d-\d\d", re.I)


def generated(path: Path) -> str:
    """What results/ generates in a document."""
    return "\n".join(match[0] for match in GENERATED.finditer(path.read_text(encoding="utf-8")))


def blocks(text: str) -> list[str]:
    """A document's paragraphs and list items. A table belongs to the paragraph before it, and an item to the
    paragraph that ends in a colon before its list. Headings, code and what is generated are left out."""
    text = re.sub(r"^```.*?^```", "", GENERATED.sub("", text), flags=re.M | re.S)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "", text, flags=re.S)
    found: list[str] = []
    lead = ""
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        block = block.strip()
        if block.startswith("|") and found:
            found[-1] += f"\n{block}"
        elif block.startswith("- "):
            found.append(f"{lead}\n{block}")
        elif block and not block.startswith(("#", "![")):
            found.append(block)
            lead = block if block.endswith(":") else ""
    return found


def untraced(block: str, folder: Path, known: str) -> list[str]:
    """The measured numbers of a block without a date or a link to a log that are neither in `known`, what is
    generated in its document, nor in what is generated in the notes that it leads to from `folder`.

    A per cent is known as a per cent. Other whole numbers of at most two digits are known from no table: any
    has them."""
    if TRACED.search(block):
        return []
    for link in re.findall(r"\]\(([\w/.]+\.md)", block):
        known += generated(folder / link)
    everything = re.findall(rf"(?<![\w.])({NUMBER})( ?%)?", known)
    numbers = {number for number, _ in everything if re.search(r"\.|\d{3}", number)}
    shares = {number for number, per_cent in everything if per_cent}
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|\b(?:Python|PyTorch|CUDA) ?≥? [\d.]+", " ", block)
    spans = [match[0] for pattern in (MEASURED, RATIO) for match in pattern.finditer(text)]
    return [x for x in spans if not set(re.findall(NUMBER, x)) <= (shares if x.endswith("%") else numbers)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_measured_numbers_have_a_source(name: str) -> None:
    path = ROOT / name
    first, *_ = path.read_text(encoding="utf-8").split("\n## Details\n")
    known = generated(path)
    found = {
        block[:60]: numbers for block in blocks(first) if (numbers := untraced(block, path.parent, known))
    }
    assert found == {}


@pytest.mark.parametrize("name", (*LADDER, *OTHERS))
def test_a_note_dates_what_was_measured(name: str) -> None:
    """In its head for all of it, in a section with a date, in a generated table, or in a note that it leads
    to; elsewhere it is quoted. What follows from arithmetic alone, predictions and resources, needs no
    date."""
    path = ROOT / "notes" / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    sections = re.split(r"\n(?=## )", GENERATED.sub("", text))
    if OF_ONE_DAY.search(sections[0]):
        return
    dated = [section for section in sections if TRACED.search(section)]
    quoted = [path.parent / link for link in re.findall(r"\]\((\w+\.md)", text)]
    known = "\n".join([generated(path), *dated, *(note.read_text(encoding="utf-8") for note in quoted)])
    found = {
        block[:60]: numbers
        for section in sections
        if section not in dated and not re.match(r"## (Prediction|What was predicted|Resources)", section)
        for block in blocks(section)
        if (numbers := untraced(block, path.parent, known))
    }
    assert found == {}


def test_what_counts_as_measured() -> None:
    nowhere = Path("nowhere")
    found = untraced("It takes 5.8 µs, 12 to 15 % less than 1.05 of ours.", nowhere, "| 12 | 15 |")
    assert found == ["5.8 µs", "12 to 15 %", "1.05"]
    assert untraced("It has 510 and 466 of our 798 TFLOP/s.", nowhere, "| 510 | 466 |") == [
        "510 and 466 of our 798 TFLOP/s"
    ]
    assert untraced("It has 510 and 466 of our 798 TFLOP/s.", nowhere, "| 510 | 466 | 798 |") == []
    for harmless in (
        "On 2026-11-21 it took 5.8 µs.",
        "It took 5.8 µs ([log](k6_log.md#runs)).",
        "Tiles of 192 × 64, 24 registers, 2048 tokens, 132 SMs at 1.98 GHz, `3 %`.",
    ):
        assert untraced(harmless, nowhere, "") == []
    (_, item) = blocks("On 2026-11-21:\n\n- It took 5.8 µs.")
    assert untraced(item, nowhere, "") == []
    table = "Times, N = 4096:\n\n| | µs |\n| --- | --- |\n| dQ | 2547 µs |"
    (block,) = blocks(
        f"# Title\n\n{table}\n\n```\n3 %\n```\n\n<!-- results:begin a -->\n3 %\n<!-- results:end a -->"
    )
    assert untraced(block, nowhere, "") == ["2547 µs"]
