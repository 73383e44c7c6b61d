"""The command line: one verb per thing a user does."""

from __future__ import annotations

from typing import NoReturn

from ckn_scale.interrupts import EXIT_CODE, end_on_signals, end_process, was_interrupted


def main(arguments: list[str] | None = None) -> NoReturn:
    """`ckn-scale`. Ctrl-C is answered in one line from the start, so the imports come after that."""
    end_on_signals()
    try:
        from ckn_scale.cli.main import run

        code = run(arguments)
    except KeyboardInterrupt:
        code = EXIT_CODE
    if was_interrupted():  # typer, or some library, made something else of it
        code = EXIT_CODE
    end_process(code)
