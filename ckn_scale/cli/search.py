"""`ckn-scale search`: queries from the shell."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckn_scale.cli.options import AsJson, Run
from ckn_scale.cli.output import announce, print_json
from ckn_scale.errors import ImageRejected, InputError

if TYPE_CHECKING:
    from ckn_scale.search.engine import Index


def search(
    run: Run,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Query images: paths or URIs.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Hits per query.")] = 10,
    box: Annotated[
        str | None,
        typer.Option(metavar="X1,Y1,X2,Y2", help="Search for this part of the image, in pixels, upright."),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The indexed images that show the same thing as the given ones.

    \b
    ckn-scale search run/ photo.jpg -k 5
    ckn-scale search run/ photo.jpg --box 120,80,360,300
    """
    corners = None if box is None else _parse_box(box, len(images))
    announce(f"opening {run}", quiet=as_json)
    from ckn_scale.search.engine import open_index

    opened = open_index(run, version)
    results = _search_all(opened, images, k, corners)
    if as_json:
        print_json({"version": opened.version, "results": results})
    else:
        _print_results(results)
    if any("error" in result for result in results):
        raise typer.Exit(1)


def _parse_box(text: str, num_images: int) -> list[float]:
    from ckn_scale.search.query_images import check_box

    try:
        box = [float(part) for part in text.split(",")]
        check_box(box)
    except ValueError:
        raise InputError(f"--box takes X1,Y1,X2,Y2 with X1 < X2 and Y1 < Y2, got {text!r}") from None
    if num_images > 1:
        raise InputError(f"--box goes with one image, got {num_images}")
    return box


def _search_all(index: Index, images: list[str], k: int, box: list[float] | None) -> list[dict[str, Any]]:
    """One result per image in their order; the vectors of all that can be used are searched for together."""
    results: list[dict[str, Any]] = []
    vectors = []
    for image in images:
        result: dict[str, Any] = {"query": image, "hits": []}
        try:
            vectors.append(index.encode(image, box))
        except ImageRejected as rejected:
            result["error"] = {"state": rejected.state, "reason": rejected.reason}
        results.append(result)
    asked = [result for result in results if "error" not in result]
    for result, hits in zip(asked, index.search_vectors(vectors, k) if vectors else [], strict=True):
        result["hits"] = [asdict(hit) for hit in hits]
    return results


def _print_results(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(result["query"])
        if "error" in result:
            print(f"  {result['error']['state']}: {result['error']['reason']}")
        for hit in result["hits"]:
            kept = "".join(f"  {name}={value}" for name, value in hit["columns"].items() if value is not None)
            print(f"  {hit['score']:.4f}  {hit['uri']}{kept}")
