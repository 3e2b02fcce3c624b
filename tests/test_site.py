"""The notes as a site: every note is on it, it builds without a warning, and links and formulas of the HTML
are whole."""

import importlib.util
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness import site, site_check
from harness.results import repository

ROOT = repository()


class Page(HTMLParser):
    """What a page has and names: anchors, links, images, formulas, and its words outside of code."""

    def __init__(self, html: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []  # without a click
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
            if tag == "script" or "canonical" not in (found.get("rel") or ""):
                self.fetched.append(self.links[-1])
        if tag == "img":
            self.images.append((found.get("src") or "", found.get("alt") or ""))
            self.links.append(found.get("src") or "")
            self.fetched.append(self.links[-1])
        self.formulas += tag == "math"
        if tag in ("code", "pre", "script", "style", "math"):
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in a folder of its own."""
    for package in ("zensical", "math_core"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package}, which builds the site, is not installed (requirements.txt has it)")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    _, said = site.build(ROOT, folder)
    assert "No issues found" in said
    return folder / site.SITE


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}


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
        assert not [
            words for words in page.words if "$$" in words or re.search(r"\$[^$]*\\|\\[([]", words)
        ], path
        assert all(alt for _, alt in page.images), path
    assert sum("drawings/" in source for page in built.values() for source, _ in page.images) >= 9


def test_the_site_fetches_nothing(built: dict[Path, Page]) -> None:
    """Scripts, styles and pictures are its own; what a reader may click leads elsewhere too."""
    assert {link for page in built.values() for link in page.fetched if urlsplit(link).netloc} == set()


def test_a_formula_that_cannot_be_read_is_refused() -> None:
    pytest.importorskip("math_core")
    page = '<span class="arithmatex">\\(x \\lt {}\\)</span> and <code>\\(code\\)</code>'
    assert site.with_formulas(page.format("y")) == (
        '<span class="arithmatex"><math><mi>x</mi><mo>&lt;</mo><mi>y</mi></math></span> '
        "and <code>\\(code\\)</code>"
    )
    with pytest.raises(ValueError, match=r"nosuch.*cannot be read"):
        site.with_formulas(page.format("\\nosuch"))


FAULTS = """
const article = document.querySelector("article");
const add = (html) => article.insertAdjacentHTML("beforeend", html);
add('<p>from $x \\\\cdot y$ on</p>');
add('<a href="#nowhere">there</a>');
add('<img src="data:image/png;base64,AAAA" alt="no picture">');
add('<div style="width: 3000px; height: 1px">far too wide</div>');
article.querySelector("p").style.color = "rgb(128, 128, 128)";
console.error("said by the page");
"""


def test_the_check_sees_what_is_wrong(folder: Path) -> None:
    """In Chromium, where there is one: a page is whole, and what is put into it is found."""
    if reason := site_check.lacking():
        pytest.skip(reason)
    with site_check.served(folder) as address, site_check.browser() as driver:
        site_check.show(driver, f"{address}/notes/k6.html")
        for scheme in site_check.SCHEMES:
            site_check.resize(driver, 390, scheme)
            assert site_check.problems(driver, scheme) == []
        driver.execute_script(FAULTS)
        site_check.resize(driver, 390, "light")
        found = "\n".join(site_check.problems(driver, "light"))
        for words in (
            "LaTeX among the words: from $x",
            "an anchor to nothing: #nowhere",
            "pixels of page in a window of 390",
            "a picture without pixels",
            "words of contrast 3.",
            "said by the page",
        ):
            assert words in found
        site_check.show(driver, f"{address}/no_such_page.html")
        assert "404" in "\n".join(site_check.problems(driver, "light"))
