"""Verbs about the published versions of a run: which there are, and back to an earlier one."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ckn_scale.cli.options import AsJson, Run
from ckn_scale.cli.output import print_json


def versions(run: Run, as_json: AsJson = False) -> None:
    """The published versions of a run: images, build, certificate, which is current.

    \b
    ckn-scale versions run/
    ckn-scale versions s3://bucket/run --json
    """
    from ckn_scale.evaluate.report import format_table
    from ckn_scale.runs.versions import list_versions
    from ckn_scale.storage.run_folder import RunFolder

    listed = list_versions(RunFolder.open(run))
    if as_json:
        print_json(listed)
        return
    rows = [_as_row(one, is_current=one["version"] == listed["current"]) for one in listed["versions"]]
    if rows:
        header = ["version", "images", "not ok", "segments", "came first", "build", "written (UTC)", ""]
        print(format_table(header, rows))
    else:
        print("no version published yet")
    for what in listed["damaged"]:
        print(f"damaged: {what}")


def _as_row(version: dict[str, Any], *, is_current: bool) -> list[str]:
    certificate = version["certificate"]
    restores = f"restores {version['restores']}" if version["restores"] else ""
    return [
        str(version["version"]),
        str(version["rows"]),
        str(sum(count for state, count in version["states"].items() if state != "ok")),
        str(version["segments"]),
        f"{certificate['first']}/{certificate['queries']}{' accepted' if certificate['accepted'] else ''}",
        version["build"],
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(version["written_at"])),
        ", ".join(filter(None, ["current" if is_current else "", restores])),
    ]


def rollback(
    run: Run,
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="N", min=1, help="The version to restore [default: the one before the current]."
        ),
    ] = None,
) -> None:
    """Make an earlier version current again, as the next version; nothing is deleted.

    Searches and servers follow it. `index` and `publish` publish the newest build again. Without N a second
    call undoes the first, so give N in scripts.

    \b
    ckn-scale versions run/
    ckn-scale rollback run/ 2
    """
    from ckn_scale.runs.versions import roll_back
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    before = opened.versions.latest()
    current = roll_back(opened, number)
    if current == before:
        print(f"version {current.number} is current and has what version {number} has: nothing to do")
        return
    restored = current.restores or number
    print(f"version {current.number} is current: {current.rows} images, those of version {restored}")
