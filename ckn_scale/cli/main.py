"""`ckn-scale`: options, exit codes and the lines a person reads. The work is done elsewhere.

Exit codes: 0 well; 1 finished, but not all is well; 2 bad input or settings; 130 interrupted.
Heavy modules (torch, Ray) are imported by the verb that needs them, so that --help is fast.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer

from ckn_scale import __version__
from ckn_scale.cli import answering, indexing, inspecting
from ckn_scale.cli.evaluate import app as evaluate_app
from ckn_scale.cli.show import app as show_app
from ckn_scale.errors import CknScaleError

app = typer.Typer(
    name="ckn-scale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Index images for instance retrieval with descriptors learned from them, and search them.",
)
for room in (indexing, inspecting, answering):
    room.register(app)
app.add_typer(evaluate_app, name="evaluate")
app.add_typer(show_app, name="show")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every error made on purpose is one line on stderr."""
    try:
        app(arguments)
    except CknScaleError as error:
        print(f"ckn-scale: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("ckn-scale: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)


def _show_version(value: bool) -> None:
    if value:
        print(f"ckn-scale {__version__}")
        raise typer.Exit


@app.callback()
def set_up(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if log_json else plain)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


class JsonLines(logging.Formatter):
    """One JSON object per record, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
