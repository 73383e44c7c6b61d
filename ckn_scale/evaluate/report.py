"""Tables for people and JSON for scripts, of what was measured."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckn_scale.errors import InputError


def check_writable(path: Path | None) -> None:
    """Before hours of work, not after them."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: its folder is missing")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: its folder is read-only")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As indented JSON; InputError when the file cannot be written."""
    write_file(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def write_file(path: Path, data: bytes) -> None:
    """All of it or nothing: renamed into place when complete."""
    try:
        descriptor, part = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor, "wb") as sink:
            sink.write(data)
        os.chmod(part, 0o666 & ~_read_umask())  # temporary files are private, results are not
        Path(part).replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _read_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column, title in enumerate(header):
        table.add_column(Text(title), justify="left" if column == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None).print(table)  # never folded, as a log wants it
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def points(share: float) -> str:
    """0.6512 → `65.1`."""
    return f"{100 * share:.1f}"
