"""Verbs about the published versions of a run: which there are, back to one, the next without some images."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckn_scale.cli.options import Accept, AsJson, Run, WorkerOptions
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

    Searches and servers follow it. Images that were deleted since are found again, until `index`, `publish`
    or `delete` publishes the next version: that holds all of the plan but what was deleted. Without N a
    second call undoes the first, so give N in scripts. Versions from before a purge cannot be restored.

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


def delete(
    run: Run,
    ids: Annotated[
        list[int] | None, typer.Argument(metavar="[IDS]...", help="Ids of images, as hits have them.")
    ] = None,
    uris: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file of URIs, one a line; -: standard input.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish the next version without some images. Takes seconds: nothing is rebuilt.

    They stay out, also of later versions, though their source still has them; new content under the same
    URI is a new image. `rollback` brings them back with the version that holds them, `purge` removes what
    is kept of them. The certificate is that of the version before: without an image, others only rank
    better.

    \b
    ckn-scale delete run/ 17 23
    ckn-scale delete run/ --uris gone.txt
    grep private uris.txt | ckn-scale delete run/ --uris -
    """
    from dataclasses import asdict

    from ckn_scale.errors import InputError
    from ckn_scale.runs.delete_images import delete_images
    from ckn_scale.storage.run_folder import RunFolder

    if not ids and uris is None:
        raise InputError("no images were named: give their ids, or a file of URIs with --uris FILE")
    report = delete_images(RunFolder.open(run), ids or [], _read_lines(uris) if uris else [])
    if as_json:
        print_json(asdict(report))
        return
    print(
        f"{report.deleted} image{'s' if report.deleted != 1 else ''} deleted"
        + (f", {report.already} {'were' if report.already != 1 else 'was'} before" if report.already else "")
    )
    if report.version is None:
        print("no version published yet: the first one will be without them")
    else:
        empty = "" if report.rows else ": the index is empty, and searches find nothing"
        print(f"version {report.version} is current: {report.rows} images{empty}")


def purge(
    run: Run,
    workers: WorkerOptions,
    accept: Accept = False,
    grace_h: Annotated[
        float,
        typer.Option(
            min=0, help="Leave old files so long after the new version, for servers that open them."
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Remove what is kept of deleted and replaced images: vectors, points, thumbnails, rows of the index.

    Small index shards, as appends leave them, are joined. The result is the next version; then the files of
    before are removed, so versions from before a purge cannot be opened or restored. Rows of the plan stay,
    with URI and id. Servers that have the old version open go on until they have loaded the new one; with
    --grace-h the old files stay, and `purge` again, or `gc`, removes them later. Copies in caches of other
    hosts ($CKN_SCALE_CACHE) are theirs to remove.

    \b
    ckn-scale purge run/
    ckn-scale purge s3://bucket/run --grace-h 1
    """
    from dataclasses import asdict

    with workers.open_driver(run) as driver:
        from ckn_scale.runs.purge import purge_run

        report = purge_run(driver, accept=accept, grace_s=grace_h * 3600)
    if as_json:
        print_json(asdict(report))
        return
    print(
        f"version {report.version} is current: {report.index_shards} index shards; nothing is kept of "
        f"{report.purged} deleted or replaced images but their rows of the plan"
    )
    if report.files_left:
        print(
            f"{report.files_left} files of before are left until {grace_h:g} h have passed: purge again then"
        )
    else:
        print(f"{report.files_removed} files of before were removed")


def _read_lines(name: str) -> list[str]:
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    return [line for line in lines if line.strip()]
