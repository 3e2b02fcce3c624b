"""Look for rendering errors of the built site in headless Chromium: `python -m harness.site_check`.

Every page of site/ is opened, served from this machine, at the width of a narrow window and of a phone, light
and dark. What a reader would stumble over is printed, page by page: errors in the console, resources that
failed, pictures without pixels, formulas left as LaTeX, anchors that lead nowhere, a page wider than its
window, words too pale.
It needs Chromium and its driver (Debian: apt-get install chromium chromium-driver) and selenium; where one is
missing it says so and exits with 0.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import importlib.util
import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.results import repository
from harness.site import SITE

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDTHS = (800, 390)  # CSS pixels
HEIGHT = 900
SCHEMES = ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "hide-scrollbars",
)

LOOK = (Path(__file__).parent / "site_check.js").read_text(encoding="utf-8")
LOADED = "return document.readyState === 'complete' && [...document.images].every((x) => x.complete)"
SHOWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"


def lacking() -> str | None:
    """What this machine has not got of what a browser needs, or None."""
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (requirements.txt has it)"
    if not any(map(shutil.which, BROWSERS)) or not shutil.which(DRIVER):
        return "there is no Chromium with its driver (Debian: apt-get install chromium chromium-driver)"
    return None


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: what fails is in the browser's log."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served to this machine."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def browser() -> Iterator[Chrome]:
    """Headless Chromium with a profile of its own."""
    from selenium import webdriver  # here: it may be lacking

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def show(driver: Chrome, address: str) -> None:
    """Open a page, with all of its pictures."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(address)
    WebDriverWait(driver, 20).until(lambda driver: driver.execute_script(LOADED))


def resize(driver: Chrome, width: int, scheme: str) -> None:
    """Show the page in a window of so many CSS pixels; scheme: light or dark, as the system would ask for."""
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    asked = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", asked)
    driver.execute_async_script(SHOWN)


def problems(driver: Chrome, scheme: str) -> list[str]:
    """What is wrong with the page that is shown."""
    said = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    return said + driver.execute_script(LOOK, scheme)


def photograph(driver: Chrome, path: Path) -> None:
    """Write the whole page that is shown, not only what its window shows, as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(taken["data"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.site_check", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="pages of the site, as notes/k6.html (default: all)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write what was seen there")
    arguments = parser.parse_args(argv)
    site = repository() / SITE
    if reason := lacking():
        print(f"skipped: {reason}")
        return 0
    if not (site / "index.html").exists():
        parser.error(f"there is no {SITE}/index.html; make site builds it")
    names = arguments.pages or sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    for name in names:
        if not (site / name).is_file():
            parser.error(f"the site has no page {name}")
    wrong = 0
    with served(site) as address, browser() as driver:
        for name in names:
            show(driver, f"{address}/{name}")
            for width, scheme in itertools.product(WIDTHS, SCHEMES):
                resize(driver, width, scheme)
                for problem in problems(driver, scheme):
                    print(f"{name}, {width} pixels, {scheme}: {problem}", flush=True)
                    wrong += 1
                if arguments.pictures:
                    photograph(driver, arguments.pictures / f"{name}-{width}-{scheme}.png")
    print(f"{len(names)} pages, {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
