"""The notes' drawings: drawn anew they are the same, they can be read, and they say what they are."""

import re
import xml.etree.ElementTree as ET

import pytest
from untraced import kernels

from harness import draw
from harness.draw import canvas, tiles, timelines
from harness.results import repository
from hopper_attention.kernels.contract import Problem

SVG = "{http://www.w3.org/2000/svg}"
NOTES = repository() / "notes"
every_drawing = pytest.mark.parametrize("name", draw.DRAWINGS)


def test_drawings_are_fresh() -> None:
    assert draw.stale(repository()) == []


@every_drawing
def test_a_drawing_can_be_read(name: str) -> None:
    text = (draw.folder(repository()) / f"{name}.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    assert root.get("width") == str(canvas.WIDTH)
    assert len(root.findtext(f"{SVG}title")) > 10
    assert root.findtext(f"{SVG}desc").endswith(".")
    words = root.findall(f"{SVG}text")
    assert words
    assert min(float(word.get("font-size")) for word in words) >= canvas.SMALLEST
    assert max(float(word.get("y")) for word in words) <= float(root.get("height"))
    painted = {element.get("class") for element in root.iter() if element.get("class")}
    assert painted <= {*canvas.PAINT, *(f"s-{stroke}" for stroke in canvas.STROKES)}
    light, dark = re.search(r"<style>(.*)@media\(prefers-color-scheme:dark\)\{(.*)\}</style>", text).groups()
    assert all(f".{paint}{{" in mode for paint in painted for mode in (light, dark))


@every_drawing
def test_a_note_shows_each_drawing_and_says_what_it_is(name: str) -> None:
    shown = rf"!\[([^\]]+)\]\(drawings/{name}\.svg\)"
    found = [found for path in NOTES.glob("*.md") for found in re.findall(shown, path.read_text("utf-8"))]
    assert found
    assert all(len(words.split()) >= 3 for words in found)


def test_words_that_do_not_fit_are_refused() -> None:
    picture = canvas.Canvas(100, "A title", "A sentence.")
    with pytest.raises(ValueError, match="does not fit"):
        picture.text(700, 20, "far too long for what is left of it")
    with pytest.raises(ValueError, match="does not fit"):
        picture.box(0, 0, 40, 20, "too long for a box", "a")
    with pytest.raises(ValueError, match="cannot be read"):
        picture.text(10, 20, "tiny", 8)


def test_the_fragment_is_that_of_the_hardware() -> None:
    """Each lane holds each of its registers once; operand A takes pairs, of one row and neighbouring keys."""
    held = {tiles.place(row, column): (row, column) for row in range(16) for column in range(16)}
    assert sorted(held) == [(lane, register) for lane in range(32) for register in range(8)]
    for lane in range(32):
        for word in range(4):
            (r0, c0), (r1, c1) = (held[lane, 2 * word + half] for half in range(2))
            assert (r1, c1) == (r0, c0 + 1)
            # PTX ISA, wgmma's A of 16 bits: word 1 is 8 rows below, words 2 and 3 are 8 columns on
            assert (r0 // 8, c0 // 8) == (word % 2, word // 2)


def test_the_timelines_are_of_the_main_loops() -> None:
    """k5's consumers fall into step; turns and k6 keep the tensor cores busier; nobody exceeds them."""
    shares = {}
    for stage in timelines.TITLES:
        found = timelines.simulate(timelines.programs_of(stage), timelines.WARM_UP + timelines.COUNTED)
        for (*_, end), (_, _, start, _) in zip(found.tensor, found.tensor[1:]):
            assert end <= start
        shares[stage] = found.behind_warm_up().tensor_share
    assert shares["k5"] < 0.65 < 0.85 < shares["k6_1"] < shares["k6"] <= 1.0
    k6 = kernels("k6").kernel_for(Problem.square(1, 1, 4096, timelines.HEAD_DIM, False))
    assert len(timelines.programs_of("k6")) == k6.consumers
