"""The notes as a site: every note is on it, it builds without a warning, and links and formulas of the HTML
are whole."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness import site
from harness.results import repository

ROOT = repository()


class Page(HTMLParser):
    """What a page has and names: anchors, links, images, formulas, and its words outside of code."""

    def __init__(self, html: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.formulas = 0
        self.words: list[str] = []
        self.inside: list[str] = []  # of what is not read as words
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if found.get("id"):
            self.ids.add(found["id"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "link") and (found.get("src") or found.get("href")):
            self.links.append(found.get("src") or found["href"])
        if tag == "img":
            self.images.append((found.get("src") or "", found.get("alt") or ""))
            self.links.append(found.get("src") or "")
        formula = "arithmatex" in (found.get("class") or "")
        self.formulas += formula
        if tag in ("code", "pre", "script", "style") or formula:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.words.append(data)


def test_every_note_is_on_the_site() -> None:
    named = set(re.findall(r": ((?:notes/)?[\w]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M))
    assert named == {"index.md"} | {f"notes/{path.name}" for path in (ROOT / "notes").glob("*.md")}


def test_links_are_turned_to_the_sites_pages() -> None:
    linked: set[str] = set()
    text = (
        "[a](../kernels/k6.py) `[b](no.md)` [c](k5.md#result) [d](https://x.y) [e](../README.md#installing)"
    )
    turned = site.rewritten(text, "notes/k6.md", ROOT, linked)
    assert turned == (
        "[a](../code/kernels/k6.py.md) `[b](no.md)` [c](k5.md#result) [d](https://x.y) "
        "[e](../index.md#installing)"
    )
    assert linked == {"kernels/k6.py", "notes/k5.md", "README.md"}
    with pytest.raises(ValueError, match="leads to nothing"):
        site.rewritten("[a](nothing.md)", "notes/k6.md", ROOT, set())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The site's pages, built in a folder of their own."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical, which builds the site, is not installed (requirements.txt has it)")
    folder = tmp_path_factory.mktemp("site")
    site.assemble(ROOT, folder / site.DOCS)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return {path.resolve(): Page(path.read_text("utf-8")) for path in (folder / "site").rglob("*.html")}


def test_links_of_the_site_lead_somewhere(built: dict[Path, Page]) -> None:
    wrong = []
    assert len(built) > 90
    for path, page in built.items():
        if path.name == "404.html":  # its links are from the site's root, wherever that is
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not place.exists() or (anchor and place in built and anchor not in built[place].ids):
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


def test_formulas_and_drawings_are_rendered(built: dict[Path, Page]) -> None:
    by_name = {path.name: page for path, page in built.items()}
    assert by_name["mathematics.html"].formulas > 100
    for path, page in built.items():
        if "code" in path.parts or path.name == "404.html":
            continue
        assert not [words for words in page.words if "$$" in words or re.search(r"\$[^$]*\\", words)], path
        assert all(alt for _, alt in page.images), path
    assert sum("drawings/" in source for page in built.values() for source, _ in page.images) >= 9
