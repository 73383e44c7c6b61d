"""Verbs that answer: search from the shell, serve over HTTP, and the demo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckn_scale.cli.options import AsJson, Run, announce, print_json
from ckn_scale.errors import ImageRejected, InputError

if TYPE_CHECKING:
    from ckn_scale.search.engine import Index

Port = Annotated[int, typer.Option(min=1, max=65535, help="Where HTTP is answered.")]


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


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback with keys.")] = "127.0.0.1",
    port: Port = 8000,
    shard_groups: Annotated[int, typer.Option(min=1, help="Deployments that share the index shards.")] = 1,
    ray: Annotated[str | None, typer.Option(help="auto: the cluster this runs in; else an own Ray.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one API key per line.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No keys, even beyond loopback.")] = False,
) -> None:
    """Answer queries over HTTP: a page at /, POST /v1/search, /healthz, /readyz.

    \b
    ckn-scale serve run/
    ckn-scale serve s3://bucket/run --ray auto --host 0.0.0.0 --api-key-file keys.txt
    """
    announce(f"opening {run}")
    from ckn_scale.serving.app import Serving, serve_run

    def tell(serving: Serving) -> None:
        print(f"serving version {serving.version} of {run} at {serving.url}  (Ctrl-C ends it)", flush=True)
        if serving.api_key is not None:
            print(f"API key, made for this call: {serving.api_key}", flush=True)

    serve_run(
        run,
        host=host,
        port=port,
        shard_groups=shard_groups,
        ray_address=ray,
        api_keys=_read_keys(api_key_file),
        insecure=insecure,
        on_ready=tell,
    )


def demo(
    folder: Annotated[
        Path, typer.Option(help="Where it works; what an earlier demo left there is removed.")
    ] = Path("demo-out"),
    port: Port = 8000,
    once: Annotated[bool, typer.Option("--once", help="End by itself after the queries.")] = False,
) -> None:
    """Index, serve and query a small photo set: the whole path, with a page to try at the end.

    \b
    ckn-scale demo --once
    """
    announce(f"making the photo set in {folder}")
    from ckn_scale.demo import run_demo

    if not run_demo(folder, port=port, once=once, say=lambda line: print(line, flush=True)):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    for verb in (search, serve, demo):
        app.command()(verb)


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


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read the keys in {path}: {error.strerror}") from None
    if not keys:
        raise InputError(f"{path} holds no key")
    return keys
