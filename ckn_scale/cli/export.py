"""The verb that takes vectors or pairs of images out of a run, for other tools."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ckn_scale.cli.options import AsJson, Run
from ckn_scale.cli.output import announce, print_json
from ckn_scale.errors import InputError
from ckn_scale.interrupts import keep_nothing

if TYPE_CHECKING:
    from ckn_scale.runs.export import Export
    from ckn_scale.runs.export_pairs import PairExport


@dataclass(frozen=True)
class ExportOptions:
    """What is taken out of a run, and how pairs are chosen and named."""

    vectors: Annotated[
        Literal["npy", "parquet"] | None, typer.Option(help="The vectors as float32, with ids and URIs.")
    ] = None
    faiss: Annotated[
        bool, typer.Option("--faiss", help="One index file that plain FAISS searches, made in memory.")
    ] = False
    pairs: Annotated[
        Literal["hloc"] | None, typer.Option(help="Pairs of images that show the same, for hloc.")
    ] = None
    matches: Annotated[
        Literal["colmap-db"] | None, typer.Option(help="Their keypoints and matches, as a COLMAP database.")
    ] = None
    neighbours: Annotated[
        int, typer.Option(min=1, max=1000, help="Of an image that make pairs with it, the best.")
    ] = 20
    image_root: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="That names of images are relative to; by default what all lie below."
        ),
    ] = None

    def chosen(self) -> str:
        """The one form that is asked for."""
        forms = (self.vectors, "faiss" if self.faiss else None, self.pairs, self.matches)
        wanted = [one for one in forms if one is not None]
        if len(wanted) != 1:
            raise InputError(
                "say what to export, one of: --vectors npy, --vectors parquet, --faiss, --pairs hloc, "
                "--matches colmap-db"
            )
        return wanted[0]


def export(
    run: Run,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new local folder; never overwritten.")],
    *,
    what: ExportOptions,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """Take a published version along: for NumPy, Parquet readers, plain FAISS, hloc or COLMAP.

    npy: vectors.npy, ids.npy and images.csv (image_id, uri, kept columns), row by row the same images, in the
    order of their ids. parquet: vectors.parquet, all in one table. --faiss: index.faiss, whose
    answers are ids, and images.csv. Vectors are those a query is compared with; where the run
    stores signs (reduction.stored), what the signs stand for.

    --pairs hloc: pairs.txt, two names a line: each image with those that match it (verified as searches are).
    --matches colmap-db: database.db with cameras, images, keypoints, matches and two-view geometries; pixels
    are those of upright images in their original size.

    \b
    ckn-scale export run/ out/ --vectors npy
    ckn-scale export s3://bucket/run out/ --vectors parquet --version 2
    ckn-scale export run/ out/ --faiss
    ckn-scale export run/ out/ --pairs hloc --neighbours 10
    ckn-scale export run/ out/ --matches colmap-db --image-root photos/
    python -c 'import faiss; print(faiss.read_index("out/index.faiss").ntotal)'
    """
    form = what.chosen()
    keep_nothing()
    announce(f"exporting {run} to {out}", quiet=quiet)
    from functools import partial

    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.runs.export import export_version
    from ckn_scale.runs.export_pairs import export_pairs
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    written: Export | PairExport
    with ProgressDisplay(quiet=quiet) as display:
        show = partial(display.show_count, "export")
        if what.pairs or what.matches:
            neighbours, image_root = what.neighbours, what.image_root
            written = export_pairs(
                opened, out, form, version, neighbours=neighbours, image_root=image_root, on_rows=show
            )
        else:
            written = export_version(opened, out, form, version, show)
    if as_json:
        print_json({"run": opened.url, "folder": out, **asdict(written)})
    else:
        _print(written, out)


def _print(written: Export | PairExport, out: str) -> None:
    from ckn_scale.runs.export_pairs import PairExport

    index = ""
    if isinstance(written, PairExport):
        found = f"{written.pairs} pairs of {written.images} images, {written.matches} verified matches"
        print(f"version {written.version}: {found} in {out}; names are relative to {written.image_root}")
    else:
        print(f"version {written.version}: {written.rows} vectors of {written.dim} numbers in {out}")
        index = f", {written.index}"
    for name, size in written.files.items():
        print(f"  {name}  {size / 1e6:.1f} MB{index if name == 'index.faiss' else ''}")
