"""The command line: one verb per thing a user does."""

from __future__ import annotations

import sys

from ckn_scale.interrupts import end_interrupted, end_on_signals, was_interrupted


def main(arguments: list[str] | None = None) -> None:
    """`ckn-scale`. Ctrl-C is answered in one line from the start, so the imports come after that."""
    end_on_signals()
    try:
        from ckn_scale.cli.main import run

        code = run(arguments)
    except KeyboardInterrupt:
        end_interrupted()
    if was_interrupted():  # typer, or some library, made something else of it
        end_interrupted()
    sys.exit(code)
