"""Reports made by the command line in this process, and read again as a browser would."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from typer.testing import CliRunner

from ckn_scale.cli.main import app

VOID = {"img", "meta", "br"}


@dataclass
class Page:
    source: str
    titles: list[str] = field(default_factory=list)  # of its sections
    texts: list[str] = field(default_factory=list)  # of whatever holds text
    tables: list[list[list[str]]] = field(default_factory=list)  # with a head
    charts: list[str] = field(default_factory=list)  # their titles
    pictures: list[str] = field(default_factory=list)  # their text
    links: list[str] = field(default_factory=list)  # to anything outside
    by_class: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    scripts: int = 0


class Reader(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page, self.open = page, []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.page.scripts += tag == "script" or any(name.startswith("on") for name in named)
        for target in (named.get("src", "data:"), named.get("href", "#")):
            if not target.startswith(("data:image/", "#")) and target != "data:":
                self.page.links.append(target)
        if tag == "img":
            self.page.pictures.append(named["alt"])
        if tag not in VOID:
            self.open.append((tag, named.get("class", ""), []))
        if tag == "thead":
            self.page.tables.append([])
        if tag == "tr" and not self._in_facts():
            self.page.tables[-1].append([])

    def handle_data(self, data):
        for _, _, texts in self.open:
            texts.append(data)

    def handle_endtag(self, tag):
        opened, kind, texts = self.open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        text = "".join(texts)
        self.page.texts.append(text)
        inside = [one for one, _, _ in self.open]
        if kind:
            self.page.by_class[kind].append(text)
        if tag == "h2":
            self.page.titles.append(text)
        if tag == "title" and inside[-1] == "svg":
            self.page.charts.append(text)
        if tag in ("td", "th") and not self._in_facts():
            self.page.tables[-1][-1].append(text)

    def _in_facts(self):
        return any(kind == "facts" for _, kind, _ in self.open)


def read_page(data: bytes) -> Page:
    page = Page(data.decode())
    reader = Reader(page)
    reader.feed(page.source)
    reader.close()
    assert reader.open == []
    return page


def report(*arguments: str | Path) -> Page:
    """`ckn-scale report …`; errors are raised as they are."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    out = arguments[list(arguments).index("-o") + 1]
    return read_page(Path(out).read_bytes())
