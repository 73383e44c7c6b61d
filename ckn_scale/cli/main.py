"""`ckn-scale`: options, exit codes and the lines a person reads. The work is done elsewhere.

Exit codes: 0 well; 1 finished, but not all is well; 2 bad input or settings; 130 interrupted.
Heavy modules (torch, Ray) are imported by the verb that needs them, so that --help is fast.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from typing import Annotated, Any, TextIO

import typer

from ckn_scale import __version__
from ckn_scale.cli.build_patches import build_patches
from ckn_scale.cli.copies import copies
from ckn_scale.cli.evaluate import app as evaluate_app
from ckn_scale.cli.explain import explain
from ckn_scale.cli.export import export
from ckn_scale.cli.index import build, encode, index, plan, publish, sample, train
from ckn_scale.cli.options import spread_options
from ckn_scale.cli.output import ANNOUNCEMENTS
from ckn_scale.cli.report import report
from ckn_scale.cli.search import search
from ckn_scale.cli.serve import demo, serve
from ckn_scale.cli.show import app as show_app
from ckn_scale.cli.status import digest, failures, gc, status, verify
from ckn_scale.cli.study import study
from ckn_scale.cli.train_network import train_network
from ckn_scale.cli.versions import delete, purge, rollback, versions
from ckn_scale.errors import CknScaleError

VERBS = (
    index,
    *(plan, sample, train, encode, build, publish),  # what `index` does, one by one
    *(status, failures, verify, digest, gc),
    *(versions, delete, purge, rollback, export, copies),
    *(search, explain, serve, demo),
    train_network,
    *(report, build_patches, study),
)

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer does not export it

app = typer.Typer(
    name="ckn-scale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Index images for instance retrieval with descriptors learned from them, and search them.",
)
for verb in VERBS:
    app.command()(spread_options(verb))
app.add_typer(evaluate_app, name="evaluate")
app.add_typer(show_app, name="show")


def run(arguments: list[str] | None = None) -> int:
    """Do what the command line says; every error is one line on stderr, every end one of the exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        code = _call(arguments)
    except Exception as error:
        message, code = explain_error(error)
        print(message, file=sys.stderr)
    return code


def _call(arguments: list[str] | None) -> int:
    """The verb's exit code. A reader that has seen enough, as `head` has, is no error."""
    try:
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as left:
        if not isinstance(left.__context__, BrokenPipeError):
            raise
    except BrokenPipeError:
        pass
    else:
        return code or 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
    return 0


def explain_error(error: Exception) -> tuple[str, int]:
    """What a person reads of an error, and the exit code: the one place that knows."""
    if isinstance(error, UsageError):
        return _explain_usage(error), 2
    if isinstance(error, CknScaleError):
        return f"ckn-scale: {error}", error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"ckn-scale: {where}{error.strerror}", 2
    logging.getLogger(__name__).info("unexpected error", exc_info=error)
    kind = type(error).__name__
    return f"ckn-scale: {kind}: {error}. This is a bug; `ckn-scale -v …` shows where it happened", 1


def _explain_usage(error: Any) -> str:
    message: str = error.format_message()
    if "\n" in message or error.ctx is None:  # the help itself
        return message
    return f"ckn-scale: {message.rstrip('.')}; see `{error.ctx.command_path} --help`"


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
    handler = StderrHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if log_json else plain)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    announcements = logging.getLogger(ANNOUNCEMENTS)
    announcements.setLevel(logging.INFO)
    announcements.propagate = log_json  # one of its objects there, a plain line otherwise
    announcements.handlers = [] if log_json else [StderrHandler()]


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the moment: while a bar is shown, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


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
