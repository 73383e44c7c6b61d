"""`ckn-scale search`: queries from the shell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ckn_scale.cli.options import AsJson
from ckn_scale.cli.output import announce, print_json
from ckn_scale.errors import CknScaleError, ImageRejected, InputError

if TYPE_CHECKING:
    from ckn_scale.client import Answer, Client
    from ckn_scale.search.engine import Expansion, Index
    from ckn_scale.search.hits import Answer as LocalAnswer

KEY_VARIABLE = "CKN_SCALE_API_KEY"
RunOrServer = Annotated[
    str, typer.Argument(metavar="RUN", help="The run folder, or a server: http://host:8000.")
]


@dataclass(frozen=True)
class SearchOptions:
    """How images are compared, and which of them."""

    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify", help="Verify hits by their points; by default where the run has points."
        ),
    ] = None
    expand: Annotated[
        bool, typer.Option("--expand", help="Ask once more with what was found: more of the same thing.")
    ] = False
    discriminative: Annotated[
        bool,
        typer.Option(
            "--discriminative", help="Expand by what tells the hits from other images, not by their mean."
        ),
    ] = False
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="EXPR", help="Only images that fulfil it: year>=2020. May be repeated."
        ),
    ] = None

    group_copies: Annotated[
        bool,
        typer.Option("--group-copies", help="Of hits that are near-copies of each other only the best."),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """What `Index.search` and a server take beside the image and k."""
        expansion: Expansion = "discriminative" if self.discriminative else self.expand
        return {
            "verify": self.verify,
            "expand": expansion,
            "filter": self.filters or None,
            "group_copies": self.group_copies,
        }


def search(
    run: RunOrServer,
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE…", help="Query images: paths or URIs.")
    ] = None,
    image_ids: Annotated[
        list[int] | None,
        typer.Option("--id", min=0, help="An indexed image, by its id, instead. May be repeated."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Hits per query.")] = 10,
    box: Annotated[
        str | None,
        typer.Option(metavar="X1,Y1,X2,Y2", help="Search for this part of the image, in pixels, upright."),
    ] = None,
    *,
    how: SearchOptions,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="For a server: a file with its key; else $CKN_SCALE_API_KEY.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The indexed images that show the same thing as the given ones, or that nothing does.

    \b
    ckn-scale search run/ photo.jpg -k 5
    ckn-scale search run/ photo.jpg --box 120,80,360,300
    ckn-scale search run/ photo.jpg --expand -k 100
    ckn-scale search run/ --id 1234
    ckn-scale search http://host:8000 photo.jpg -k 5
    ckn-scale search run/ photo.jpg --filter 'year>=2020' --filter 'uri^=s3://bucket/2020/'
    """
    queries = _list_queries(images, image_ids)
    corners = None if box is None else parse_box(box, len(queries))
    if corners is not None and image_ids:
        raise InputError("--box goes with an image file: an indexed one is searched for as a whole")
    options = how.arguments()
    if is_server(run):
        found = _ask_server(run, api_key_file, queries, k, corners, {**options, "version": version})
    elif api_key_file is not None:
        raise InputError(f"--api-key-file is for a server, http://host:port, and {run} is a run folder")
    else:
        announce(f"opening {run}", quiet=as_json)
        from ckn_scale.search.engine import open_index

        found = _search_run(open_index(run, version), queries, k, corners, options)
    if as_json:
        decision = {} if found.decision is None else {"min_inliers": found.decision.min_inliers}
        print_json({"version": found.version, "results": found.results, **decision})
    else:
        _print_results(found)
    if any("error" in result for result in found.results):
        raise typer.Exit(1)


def _list_queries(images: list[str] | None, image_ids: list[int] | None) -> list[str | int]:
    """Files by name, indexed images by id."""
    if bool(images) == bool(image_ids):
        raise InputError("name query images, or indexed ones with --id: one or the other")
    return [*(images or []), *(image_ids or [])]


def is_server(run: str) -> bool:
    return run.startswith(("http://", "https://"))


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


@dataclass
class Found:
    """One result per image in their order, from a run or a server."""

    version: int | None
    results: list[dict[str, Any]]
    decision: Decision | None  # what makes a hit a match, where hits can be verified


class Decision(Protocol):
    @property
    def min_inliers(self) -> int: ...
    @property
    def false_alarm_rate(self) -> float: ...


def _search_run(
    index: Index, queries: list[str | int], k: int, box: list[float] | None, options: dict[str, Any]
) -> Found:
    """All images that can be used are searched for together."""
    if all(isinstance(one, int) for one in queries):
        answers = [index.similar(int(one), k, **options) for one in queries]
        results = [_describe_answer(one, answer) for one, answer in zip(queries, answers, strict=True)]
    else:
        results = _search_files(index, [str(one) for one in queries], k, box, options)
    return Found(index.version, results, index.calibration if index.can_verify else None)


def _search_files(
    index: Index, images: list[str], k: int, box: list[float] | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    queries = []
    for image in images:
        try:
            queries.append(index.encode_query(image, box))
            results.append({"query": image})
        except ImageRejected as rejected:
            error = {"state": rejected.state, "reason": rejected.reason}
            results.append({"query": image, "hits": [], "error": error})
    asked = [result for result in results if "error" not in result]
    for result, answer in zip(asked, index.search_queries(queries, k, **options), strict=True):
        result.update(_describe_answer(result["query"], answer))
    return results


def _ask_server(
    url: str,
    api_key_file: Path | None,
    images: list[str | int],
    k: int,
    box: list[float] | None,
    options: dict[str, Any],
) -> Found:
    from ckn_scale.client import Answer, Client

    found = Found(None, [], None)
    with Client(url, key=read_key(api_key_file)) as client:
        answers = _search_all(client, images, k, box, options)
    for image, answer in zip(images, answers, strict=True):
        if isinstance(answer, Answer):
            found.results.append(_describe_answer(image, answer))
            found.version, found.decision = answer.version, answer.decision
        elif isinstance(answer, ImageRejected):
            error = {"state": answer.state, "reason": answer.reason}
            found.results.append({"query": image, "hits": [], "error": error})
        else:
            raise answer
    return found


def _search_all(
    client: Client, queries: list[str | int], k: int, box: list[float] | None, options: dict[str, Any]
) -> Sequence[Answer | CknScaleError]:
    """Files together where there are several; a box goes with one."""
    files = [query for query in queries if isinstance(query, str)]
    if len(files) > 1 and len(files) == len(queries):
        return client.search_batch(files, k, **options)
    return [_search_one(client, query, k, box, options) for query in queries]


def _search_one(
    client: Client, image: str | int, k: int, box: list[float] | None, options: dict[str, Any]
) -> Answer | ImageRejected:
    if isinstance(image, int):
        return client.similar(image, k, **options)
    try:
        return client.search(image, k, box, **options)
    except ImageRejected as rejected:
        return rejected


def _describe_answer(query: str | int, answer: Answer | LocalAnswer) -> dict[str, Any]:
    copies = answer.copies
    grouped = [{"copies": list(copies[hit.image_id])} if copies.get(hit.image_id) else {} for hit in answer]
    result: dict[str, Any] = {
        "query": query,
        "hits": [{**hit.to_form(), **more} for hit, more in zip(answer, grouped, strict=True)],
    }
    if answer.found is not None:
        result["found"] = answer.found
    if getattr(answer, "partial", False):
        result.update(partial=True, coverage=getattr(answer, "coverage", 1.0))
    return result


def read_key(path: Path | None) -> str | None:
    """The key for a server: the first line of a file, else the environment's."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read the key in {path}: {error.strerror}") from None
    if not lines:
        raise InputError(f"{path} holds no key")
    return lines[0]


def _print_results(found: Found) -> None:
    for result in found.results:
        query = result["query"]
        print(f"image {query}" if isinstance(query, int) else query)
        if "error" in result:
            print(f"  {result['error']['state']}: {result['error']['reason']}")
        if "partial" in result:
            print(f"  only {result['coverage']:.1%} of the index answered")
        if "found" in result and found.decision is not None:
            _print_verdict(result, found.decision)
        matches = [place for place, hit in enumerate(result["hits"]) if hit.get("match")]
        for place, hit in enumerate(result["hits"]):
            if "match" in hit and place == max(matches, default=-1) + 1:
                print("  ---- similar, but no match ----")
            _print_hit(hit)


def _print_hit(hit: dict[str, Any]) -> None:
    kept = "".join(f"  {name}={value}" for name, value in hit["columns"].items() if value is not None)
    verdict = "match" if hit.get("match") else "     "
    evidence = f"  {verdict}  {hit['inliers']:4d} inliers" if "inliers" in hit else ""
    copies = f"  and {len(hit['copies'])} near-copies" if hit.get("copies") else ""
    print(f"  {hit['score']:.4f}{evidence}  {hit['uri']}{kept}{copies}")


def _print_verdict(result: dict[str, Any], decision: Decision) -> None:
    """Found or not, and how sure that is."""
    count = sum(hit["match"] for hit in result["hits"])
    found = f"found: {count} {'match' if count == 1 else 'matches'}" if count else "nothing found"
    pairs = f"1 in {1 / decision.false_alarm_rate:,.0f} pairs of unrelated images"
    print(f"  {found} (a match has ≥ {decision.min_inliers} inliers, which {pairs} has by chance)")
