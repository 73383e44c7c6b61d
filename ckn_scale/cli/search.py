"""`ckn-scale search`: queries from the shell."""

from __future__ import annotations

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
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Verify hits by their points; by default where the run has points."
        ),
    ] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="Ask once more with what was found: more of the same thing.")
    ] = False,
    discriminative: Annotated[
        bool,
        typer.Option(
            "--discriminative", help="Expand by what tells the hits from other images, not by their mean."
        ),
    ] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="EXPR", help="Only images that fulfil it: year>=2020. May be repeated."
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The indexed images that show the same thing as the given ones, or that nothing does.

    \b
    ckn-scale search run/ photo.jpg -k 5
    ckn-scale search run/ photo.jpg --box 120,80,360,300
    ckn-scale search run/ photo.jpg --expand -k 100
    ckn-scale search run/ photo.jpg --filter 'year>=2020' --filter 'uri^=s3://bucket/2020/'
    """
    corners = None if box is None else parse_box(box, len(images))
    announce(f"opening {run}", quiet=as_json)
    from ckn_scale.search.engine import open_index

    opened = open_index(run, version)
    expansion = "discriminative" if discriminative else expand
    options = {"verify": verify, "expand": expansion, "filter": filters or None}
    results = _search_all(opened, images, k, corners, options)
    if as_json:
        decision = {"min_inliers": opened.calibration.min_inliers} if opened.can_verify else {}
        print_json({"version": opened.version, "results": results, **decision})
    else:
        _print_results(results, opened)
    if any("error" in result for result in results):
        raise typer.Exit(1)


def parse_box(text: str, num_images: int) -> list[float]:
    """The four numbers of `--box`; InputError when it is none, or there are several images."""
    from ckn_scale.search.query_images import check_box

    try:
        box = [float(part) for part in text.split(",")]
        check_box(box)
    except ValueError:
        raise InputError(f"--box takes X1,Y1,X2,Y2 with X1 < X2 and Y1 < Y2, got {text!r}") from None
    if num_images > 1:
        raise InputError(f"--box goes with one image, got {num_images}")
    return box


def _search_all(
    index: Index,
    images: list[str],
    k: int,
    box: list[float] | None,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """One result per image in their order; all that can be used are searched for together."""
    results: list[dict[str, Any]] = []
    queries = []
    for image in images:
        result: dict[str, Any] = {"query": image, "hits": []}
        try:
            queries.append(index.encode_query(image, box))
        except ImageRejected as rejected:
            result["error"] = {"state": rejected.state, "reason": rejected.reason}
        results.append(result)
    asked = [result for result in results if "error" not in result]
    answers = index.search_queries(queries, k, **options)
    for result, answer in zip(asked, answers, strict=True):
        result["hits"] = [hit.to_form() for hit in answer]
        if answer.found is not None:
            result["found"] = answer.found
    return results


def _print_results(results: list[dict[str, Any]], index: Index) -> None:
    for result in results:
        print(result["query"])
        if "error" in result:
            print(f"  {result['error']['state']}: {result['error']['reason']}")
        if "found" in result:
            _print_verdict(result, index)
        matches = [place for place, hit in enumerate(result["hits"]) if hit.get("match")]
        for place, hit in enumerate(result["hits"]):
            if "match" in hit and place == max(matches, default=-1) + 1:
                print("  ---- similar, but no match ----")
            _print_hit(hit)


def _print_hit(hit: dict[str, Any]) -> None:
    kept = "".join(f"  {name}={value}" for name, value in hit["columns"].items() if value is not None)
    verdict = "match" if hit.get("match") else "     "
    evidence = f"  {verdict}  {hit['inliers']:4d} inliers" if "inliers" in hit else ""
    print(f"  {hit['score']:.4f}{evidence}  {hit['uri']}{kept}")


def _print_verdict(result: dict[str, Any], index: Index) -> None:
    """Found or not, and how sure that is."""
    count = sum(hit["match"] for hit in result["hits"])
    found = f"found: {count} {'match' if count == 1 else 'matches'}" if count else "nothing found"
    pairs = f"1 in {1 / index.calibration.false_alarm_rate:,.0f} pairs of unrelated images"
    print(f"  {found} (a match has ≥ {index.calibration.min_inliers} inliers, which {pairs} has by chance)")
