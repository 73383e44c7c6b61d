"""A real browser for the page's tests, and axe-core in it; each is installed where it is missing."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
AXE = "axe-core@4.14.0"
RUN_AXE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map(
  ({id, impact, nodes}) => ({id, impact, nodes: nodes.map(({html, any}) => [html, any[0]?.message])}))"""


def install_package(name: str) -> None:
    """Debian's, where we may."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, timeout=120)
        subprocess.run(["apt-get", "install", "-qy", name], capture_output=True, timeout=280)


@contextmanager
def open_browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        install_package("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()
    with warnings.catch_warnings():
        # Playwright leaves its driver's pipe to the garbage collector; here, and not in someone's test.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def install_axe(folder: Path) -> str:
    """axe-core's source."""
    if shutil.which("npm") is None:
        install_package("npm")
    command = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--cache",
        f"{folder}/cache",
        "--prefix",
        str(folder),
        AXE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


def find_barriers(page: Page, axe: str) -> list[dict[str, Any]]:
    """What axe-core finds wrong with the page as it is now, in both colour schemes."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    found = []
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found += page.evaluate(RUN_AXE)
    return found


def swipe(page: Page, start: tuple[float, float], end: tuple[float, float], steps: int = 4) -> None:
    """One finger from here to there."""
    session = page.context.new_cdp_session(page)
    points = [
        {"x": start[0] + (end[0] - start[0]) * i / steps, "y": start[1] + (end[1] - start[1]) * i / steps}
        for i in range(steps + 1)
    ]
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points[:1]})
    for point in points[1:]:
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [point]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    session.detach()
