"""A page of HTML that needs no other file. Built as a tree, so whatever is text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias
from xml.etree import ElementTree

Element: TypeAlias = ElementTree.Element
Content: TypeAlias = "Element | str"
MISSING = "–"


def make(tag: str, *content: Content, **attributes: object) -> Element:
    """`make("td", "text", make("b", "bold"), class_="number")`."""
    element = ElementTree.Element(tag)
    for name, value in attributes.items():
        element.set(name.rstrip("_").replace("_", "-"), clean(str(value)))
    for one in content:
        if not isinstance(one, str):
            element.append(one)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + clean(one)
        else:
            element.text = (element.text or "") + clean(one)
    return element


def clean(text: str) -> str:
    """Names of files may be any bytes: what is no text, or would be none in a page, is spelt out."""
    printable = "".join(one if one >= " " or one in "\t\n" else f"\\x{ord(one):02x}" for one in text)
    return printable.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Cell:
    """What a table shows other than plain text: `kind` is a class of the style sheet."""

    text: str
    kind: str = ""


def make_table(
    header: Sequence[str], rows: Sequence[Sequence[str | Cell | Element]], *, caption: str = ""
) -> Element:
    """The first column to the left, the others to the right; wide ones scroll in a browser."""
    head = make("thead", make("tr", *(make("th", title, scope="col") for title in header)))
    body = make("tbody", *(make("tr", *map(_make_cell, row)) for row in rows))
    title = [make("caption", caption)] if caption else []
    return make("div", make("table", *title, head, body), class_="wide")


def _make_cell(value: str | Cell | Element) -> Element:
    if isinstance(value, Cell):
        return make("td", value.text, class_=value.kind) if value.kind else make("td", value.text)
    return make("td", value)


def make_facts(facts: Sequence[tuple[str, str]]) -> Element:
    """Names and values, two columns."""
    rows = [make("tr", make("th", name, scope="row"), make("td", value)) for name, value in facts]
    return make("table", make("tbody", *rows), class_="facts")


def make_picture(data: bytes, text: str, *, kind: str = "image/png") -> Element:
    """The file itself, inside the page; `text` says what it shows."""
    return make("img", src=f"data:{kind};base64,{base64.b64encode(data).decode()}", alt=text)


def make_figure(picture: Element, caption: str) -> Element:
    return make("figure", picture, make("figcaption", caption))


def make_section(title: str, *content: Content) -> Element:
    return make("section", make("h2", title), *content)


def write_page(title: str, subtitle: str, sections: Sequence[Element]) -> bytes:
    """The whole file; it loads nothing, and a browser is told to refuse what would."""
    links = [make("li", make("a", _title_of(one), href=f"#part-{k}")) for k, one in enumerate(sections, 1)]
    for number, section in enumerate(sections, 1):
        section.set("id", f"part-{number}")
    head = make(
        "head",
        make("meta", charset="utf-8"),
        make("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; img-src data:; style-src 'unsafe-inline'",
        ),
        make("title", title),
        make("style", files("ckn_scale.report").joinpath("report.css").read_text()),
    )
    contents = [make("nav", make("ul", *links), aria_label="Contents")] if len(links) > 1 else []
    body = make(
        "body", make("header", make("h1", title), make("p", subtitle)), *contents, make("main", *sections)
    )
    tree = make("html", head, body, lang="en")
    text = ElementTree.tostring(tree, encoding="unicode", method="html")
    return f"<!doctype html>\n{text}\n".encode()


def _title_of(section: Element) -> str:
    return section[0].text or ""
