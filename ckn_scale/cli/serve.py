"""`ckn-scale serve`, and the demo, which ends in a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ckn_scale.cli.options import Ray, Run
from ckn_scale.cli.output import announce
from ckn_scale.errors import InputError

Port = Annotated[int, typer.Option(min=1, max=65535, help="Where HTTP is answered.")]


@dataclass(frozen=True)
class AccessOptions:
    """Who is answered, what is given out, and what is written about it."""

    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with an API key per line: KEY [scope=…] [rate=…].")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="No keys, even beyond loopback.")] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages of https://host may ask (CORS). May be repeated."),
    ] = None
    uri_prefix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX",
            help="Give out originals below it, and fetch URIs below it for the page. May be repeated.",
        ),
    ] = None
    access_log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A JSON line per request, without its image; - is stderr."),
    ] = None

    def settings(self) -> dict[str, Any]:
        return {
            "api_keys": _read_keys(self.api_key_file),
            "insecure": self.insecure,
            "allowed_origins": tuple(self.allow_origin or ()),
            "uri_prefixes": tuple(self.uri_prefix or ()),
            "access_log": self.access_log,
        }


@dataclass(frozen=True)
class LoadOptions:
    """How much is answered at once; what is not given follows the machine."""

    encoder_replicas: Annotated[
        int | None, typer.Option(min=1, help="Processes that describe queries; by default as the cores say.")
    ] = None
    encoder_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each; by default as the cores say.")
    ] = None
    max_wait_s: Annotated[
        float | None, typer.Option(help="Who would be answered later gets 429 at once; 4 by default.")
    ] = None

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback with keys.")] = "127.0.0.1",
    port: Port = 8000,
    shard_groups: Annotated[int, typer.Option(min=1, help="Deployments that share the index shards.")] = 1,
    ray: Ray = "local",
    local: Annotated[
        bool, typer.Option("--local", help="Answer from this process, without Ray: small, and up in seconds.")
    ] = False,
    *,
    access: AccessOptions,
    load: LoadOptions,
) -> None:
    """Answer queries over HTTP: a page at /, POST /v1/search, /healthz, /readyz, /metrics.

    \b
    ckn-scale serve run/
    ckn-scale serve run/ --local
    ckn-scale serve s3://bucket/run --ray auto --host 0.0.0.0 --api-key-file keys.txt
    """
    if local and ray == "auto":
        raise InputError("--local serves from this process, --ray auto from a cluster: give one of them")
    announce(f"opening {run}")
    from ckn_scale.serving.app import Serving, serve_run

    def report(serving: Serving) -> None:
        print(f"serving version {serving.version} of {run} at {serving.url}  (Ctrl-C ends it)", flush=True)
        if serving.api_key is not None:
            print(f"API key, generated for this call: {serving.api_key}", flush=True)

    where = {"host": host, "port": port, "shard_groups": shard_groups}
    options = {**where, **access.settings(), **load.settings(), "on_ready": report}
    if local:
        from ckn_scale.serving.local import serve_local

        serve_local(run, **options)
    else:
        # Ray's own "local" has no token and is open to others
        serve_run(run, ray_address="auto" if ray == "auto" else None, **options)


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    from ckn_scale.serving.keys import parse_keys

    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InputError(f"cannot read the keys in {path}: {error.strerror}") from None
    if not parse_keys(lines):
        raise InputError(f"{path} holds no key")
    return lines


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
    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.demo import run_demo

    def say(line: str) -> None:
        print(line, flush=True)

    with ProgressDisplay() as display:
        if not run_demo(folder, port=port, once=once, say=say, on_progress=display.show_step):
            raise typer.Exit(1)
