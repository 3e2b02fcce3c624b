"""The documents as a site: `python -m harness.site` writes it to site/.

The documents are written for GitHub, where a link may lead to any file. On the site README.md is the first
page, notes are pages, figures and JSON are copied, and every file of code that a document links to becomes a
page of its own, highlighted, with a link back to its notes. Zensical builds the pages from .site/docs; then
their formulas become MathML, which browsers show by themselves: the site fetches nothing.
"""

import argparse
import html
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.results import repository

DOCS = Path(".site") / "docs"
SITE = Path("site")
CODE = {".py": "python", ".toml": "toml", ".txt": "text", "": "text"}
COPIED = {".png", ".svg", ".json"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
# As pymdownx.arithmatex leaves them, \(…\) in a line and \[…\] displayed.
FORMULA = re.compile(r'(<(?:span|div) class="arithmatex">)\\([(\[])(.*?)\\[)\]]\s*(</(?:span|div)>)', re.S)


def page_of(path: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if path == "README.md":
        return "index.md"
    if Path(path).suffix in {".md", *COPIED}:
        return path
    return f"code/{path}.md"


def relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def rewritten(text: str, source: str, root: Path, linked: set[str]) -> str:
    """A document with its links turned to the site's pages; `linked` gets the files they lead to. Raises
    ValueError for a link to nothing."""
    page = page_of(source)

    def turn(match: re.Match) -> str:
        before, link, after = match.groups()
        if link.startswith(("https://", "http://", "#")):
            return match.group(0)
        target, hash_, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (root / path).exists():
            raise ValueError(f"{source}: {link} leads to nothing")
        if (root / path).is_dir():
            path = f"{path}/"
        linked.add(path)
        return f"{before}{relative(page_of(path.rstrip('/')), page)}{hash_}{anchor}{after}"

    pieces = FENCE.split(text)  # every other piece is code
    return "".join(piece if i % 2 else LINK.sub(turn, piece) for i, piece in enumerate(pieces))


def code_page(path: str, root: Path, notes: Sequence[str]) -> str:
    """The page of a file of code, or of a folder: its files."""
    page = page_of(path.rstrip("/"))
    back = ", ".join(f"[{note}]({relative(page_of(note), page)})" for note in notes)
    head = f"# {path}\n\n{f'Named in {back}.' if back else ''}\n\n"
    if path.endswith("/"):
        names = sorted(x.name + "/" * x.is_dir() for x in (root / path).iterdir() if x.name[0] not in "._")
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = (root / path).read_text(encoding="utf-8")
    return f'{head}```{CODE[Path(path).suffix]} linenums="1"\n{text}```\n'


def assemble(root: Path, docs: Path) -> list[str]:
    """Write the site's sources into the folder `docs`, anew. Returns the pages."""
    if docs.exists():
        shutil.rmtree(docs)
    sources = ["README.md", *(f"notes/{path.name}" for path in sorted((root / "notes").glob("*.md")))]
    links: dict[str, set[str]] = {}
    pages = []

    def write(page: str, text: str) -> None:
        (docs / page).parent.mkdir(parents=True, exist_ok=True)
        (docs / page).write_text(text, encoding="utf-8")
        pages.append(page)

    for source in sources:
        links[source] = set()
        text = (root / source).read_text(encoding="utf-8")
        write(page_of(source), rewritten(text, source, root, links[source]))
    for path in sorted(set().union(*links.values()) - set(sources)):
        if Path(path).suffix in COPIED:
            (docs / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, docs / path)
        else:
            notes = [source for source in sources if path in links[source]]
            write(page_of(path.rstrip("/")), code_page(path, root, notes))
    for path in (root / "harness" / "site_assets").glob("*"):
        (docs / "assets").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, docs / "assets" / path.name)
    return pages


def with_formulas(page: str) -> str:
    """A page's HTML with its formulas as MathML. Raises ValueError for one that cannot be read."""
    from math_core import LatexError, LatexToMathML  # here: no other command needs it

    converter = LatexToMathML(fancy_error=False)

    def turn(match: re.Match) -> str:
        before, bracket, latex, after = match.groups()
        latex = html.unescape(latex)
        try:
            formula = converter.convert_with_local_state(latex, displaystyle=bracket == "[")
        except LatexError as error:
            raise ValueError(f"the formula {latex!r} cannot be read: {error}") from error
        return f"{before}{formula}{after}"

    return FORMULA.sub(turn, page)


def build(root: Path, folder: Path) -> tuple[list[str], str]:
    """Build the site of the repository `root` in `folder`, which has mkdocs.yml. Returns the pages and what
    Zensical said. Raises RuntimeError where it finds an issue."""
    pages = assemble(root, folder / DOCS)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(said)
    for path in sorted((folder / SITE).rglob("*.html")):
        path.write_text(with_formulas(path.read_text(encoding="utf-8")), encoding="utf-8")
    return pages, said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.site", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    pages, said = build(repository(), repository())
    print(f"{said}{len(pages)} pages: open {SITE}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
