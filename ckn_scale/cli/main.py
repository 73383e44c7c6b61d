"""`ckn-scale`: options, exit codes and the lines a person reads. The work is done elsewhere.

Exit codes: 0 well; 1 finished, but not all is well; 2 bad input or settings; 130 interrupted.
Heavy modules (torch, Ray) are imported by the verb that needs them, so that --help is fast.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ckn_scale import __version__
from ckn_scale.cli.evaluate import app as evaluate_app
from ckn_scale.errors import CknScaleError, InputError

app = typer.Typer(
    name="ckn-scale",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Index images for instance retrieval with descriptors learned from them, and search them.",
)
app.add_typer(evaluate_app, name="evaluate")

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run folder: a path or s3://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Preset = Annotated[str, typer.Option(help="Named settings: compact (default), paper, tiny.")]
Config = Annotated[str | None, typer.Option("--config", help="A TOML file of settings over the preset.")]
Override = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, over all; may repeat.")]


def main() -> None:
    """Run the command line; every error made on purpose is one line on stderr."""
    try:
        app()
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
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@app.command()
def index(
    images: Annotated[
        str, typer.Argument(metavar="IMAGES", help="A folder, glob, list, tar or Parquet file.")
    ],
    run: Run,
    preset: Preset = "compact",
    config: Config = None,
    override: Override = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes or actors; 0: this process.")] = 2,
    ray: Annotated[
        str | None, typer.Option(help="local: an own Ray; auto: the cluster this runs in.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A column of the list that hits carry.")] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Publish below the target, on record.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """List, learn, encode, build and publish: everything, resumable.

    \b
    ckn-scale index photos/ run/
    ckn-scale index s3://bucket/photos s3://bucket/run --ray auto --workers 16
    ckn-scale index list.csv run/ --preset paper --set keypoints.max_keypoints=2000
    """
    from ckn_scale.config import load_settings, parse_resources

    settings = load_settings(preset, config, override or [])
    resources = parse_resources({"workers": workers, "ray": ray})
    from ckn_scale.cli.progress import ProgressLine
    from ckn_scale.runners.index_images import check_tolerance, index_images

    progress = ProgressLine(quiet=quiet)
    report = index_images(
        images, run, settings, resources, keep=keep or [], accept=accept, on_progress=progress
    )
    print(f"version {report.version} of {report.run}: {_count_states(report.states)}")
    check_tolerance(report, settings.publish.max_failed_share)


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """How far a run is: shards per step, images by state, the current version.

    \b
    ckn-scale status run/
    ckn-scale status s3://bucket/run --json
    """
    from ckn_scale.cli.progress import title_of
    from ckn_scale.steps.run_status import summarise_run
    from ckn_scale.storage.run_folder import RunFolder

    summary = summarise_run(RunFolder.open(run))
    if as_json:
        _print_json(summary)
        return
    for step in summary["steps"]:
        if step["total"]:
            counts = f"{step['done']:>6}/{step['total']} shards"
            print(f"{title_of(step['step']):<27}{counts}  {step['seconds']:.1f} s of work")
    images = summary["images"]
    print(f"{images['planned']} images planned: {_count_states(images['states'])}")
    if summary["version"] is None:
        print("no version published yet")
        return
    certificate = summary["certificate"]
    print(
        f"version {summary['version']}: {certificate['first']} of {certificate['queries']} planted queries "
        f"came back first (at least {certificate['lower']:.3f}, target {certificate['target']:g})"
    )


@app.command()
def digest(run: Run, as_json: AsJson = False) -> None:
    """One digest per stage over the committed rows: equal runs have equal digests.

    \b
    ckn-scale digest run/ --json
    """
    from ckn_scale.steps.run_digest import digest_run
    from ckn_scale.storage.run_folder import RunFolder

    digests = digest_run(RunFolder.open(run))
    if as_json:
        _print_json(digests)
        return
    for stage, value in digests.items():
        print(f"{stage:<12} {value}")


@app.command()
def failures(
    run: Run,
    reason: Annotated[
        str | None, typer.Option(help="Only this state: corrupt, truncated, missing, …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Every image that could not be used, with its state and reason.

    \b
    ckn-scale failures run/ --reason corrupt
    """
    from ckn_scale.schemas import IMAGE_STATES
    from ckn_scale.steps.run_status import list_failures
    from ckn_scale.storage.run_folder import RunFolder

    if reason is not None and reason not in IMAGE_STATES:
        raise InputError(f"no state named {reason!r}; there are: {', '.join(IMAGE_STATES)}")
    for row in list_failures(RunFolder.open(run), reason):
        print(json.dumps(row) if as_json else f"{row['state']:<12} {row['uri']}  ({row['reason']})")


@app.command()
def search(
    run: Run,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="Query images: paths or URIs.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Hits per query.")] = 10,
    version: Annotated[
        int | None, typer.Option(help="A published version; the current one by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The indexed images that show the same thing as the given ones.

    \b
    ckn-scale search run/ photo.jpg -k 5
    """
    from ckn_scale.errors import ImageRejected
    from ckn_scale.search.engine import open_index

    opened = open_index(run, version)
    results: list[dict[str, Any]] = []
    for image in images:
        try:
            hits = [asdict(hit) for hit in opened.search(image, k)]
            results.append({"query": image, "hits": hits})
        except ImageRejected as rejected:
            error = {"state": rejected.state, "reason": rejected.reason}
            results.append({"query": image, "hits": [], "error": error})
    if as_json:
        _print_json({"version": opened.version, "results": results})
    else:
        _print_results(results)
    if any("error" in result for result in results):
        raise typer.Exit(1)


@app.command()
def serve(
    run: Run,
    host: Annotated[
        str, typer.Option(help="Where to listen; keys are needed beyond loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
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
    from ckn_scale.serving.app import Serving, serve_run

    def announce(serving: Serving) -> None:
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
        on_ready=announce,
    )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where it works; made anew.")] = Path("demo-out"),
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    once: Annotated[bool, typer.Option("--once", help="End by itself after the queries.")] = False,
) -> None:
    """Index, serve and query a small photo set: the whole path, with a page to try at the end.

    \b
    ckn-scale demo --once
    """
    from ckn_scale.demo import run_demo

    if not run_demo(folder, port=port, once=once, say=lambda line: print(line, flush=True)):
        raise typer.Exit(1)


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


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _print_results(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(result["query"])
        if "error" in result:
            print(f"  {result['error']['state']}: {result['error']['reason']}")
        for hit in result["hits"]:
            print(f"  {hit['score']:.4f}  {hit['uri']}")


def _count_states(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none encoded yet"
