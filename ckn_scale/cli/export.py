"""The verb that takes vectors out of a run, for other tools."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ckn_scale.cli.options import AsJson, Run
from ckn_scale.cli.output import announce, print_json
from ckn_scale.errors import InputError
from ckn_scale.interrupts import keep_nothing


def export(
    run: Run,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new local folder; never overwritten.")],
    *,
    vectors: Annotated[
        Literal["npy", "parquet"] | None, typer.Option(help="The vectors as float32, with ids and URIs.")
    ] = None,
    faiss: Annotated[
        bool, typer.Option("--faiss", help="One index file that plain FAISS searches, made in memory.")
    ] = False,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """Take the vectors of a published version along, for NumPy, Parquet readers or plain FAISS.

    npy: vectors.npy, ids.npy and images.csv (image_id, uri, kept columns), row by row the same images, in the
    order of their ids. parquet: vectors.parquet, all in one table. --faiss: index.faiss, whose
    answers are ids, and images.csv. Vectors are those a query is compared with; where the run
    stores signs (reduction.stored), what the signs stand for.

    \b
    ckn-scale export run/ out/ --vectors npy
    ckn-scale export s3://bucket/run out/ --vectors parquet --version 2
    ckn-scale export run/ out/ --faiss
    python -c 'import faiss; print(faiss.read_index("out/index.faiss").ntotal)'
    """
    if (vectors is None) == (not faiss):
        raise InputError("say what to export: either --vectors npy, --vectors parquet or --faiss")
    keep_nothing()
    announce(f"exporting {run} to {out}", quiet=quiet)
    from dataclasses import asdict
    from functools import partial

    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.runs.export import export_version
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    form = vectors or "faiss"
    with ProgressDisplay(quiet=quiet) as display:
        show = partial(display.show_count, "export")
        written = export_version(opened, out, form, version, show)
    if as_json:
        print_json({"run": opened.url, "folder": out, **asdict(written)})
        return
    print(f"version {written.version}: {written.rows} vectors of {written.dim} numbers in {out}")
    for name, size in written.files.items():
        what = f", {written.index}" if name == "index.faiss" else ""
        print(f"  {name}  {size / 1e6:.1f} MB{what}")
