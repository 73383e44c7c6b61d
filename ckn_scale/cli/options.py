"""Arguments and options that several verbs share, so that they read the same everywhere."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal

import typer

ANNOUNCEMENTS = "ckn_scale.announcements"  # the logger of what a user is told on stderr

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run folder: a path or s3://bucket/prefix.")]
Images = Annotated[
    str,
    typer.Argument(metavar="IMAGES", help="A folder, glob, list (txt, csv, parquet) or tar."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Preset = Annotated[str, typer.Option(help="Named settings: compact, paper, tiny.")]
Config = Annotated[str | None, typer.Option("--config", help="A TOML file of settings over the preset.")]
Override = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, over all; may repeat.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes or Ray actors; 0: this process itself.")]
Ray = Annotated[str | None, typer.Option(help="local: a Ray of its own; auto: the cluster this runs in.")]
GpusPerWorker = Annotated[float, typer.Option(help="Of a Ray actor, with --device cuda; may be a part.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where the run computes, settled by its plan; auto: cuda where workers see one."),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(help="A column of the list that hits carry; may repeat. Settled when the run is planned."),
]
Background = Annotated[
    list[str] | None,
    typer.Option(
        help="Photographs of other things (a folder, glob, list, tar, or another run), not indexed, from "
        "which it is learned what all images share; may repeat."
    ),
]
Append = Annotated[
    bool,
    typer.Option(
        "--append", help="Add what IMAGES has beyond the run's plan; without it IMAGES must be the run's own."
    ),
]
Models = Annotated[
    str | None,
    typer.Option(help="A run, or its models/000001.json, to take the models of."),
]
Accept = Annotated[
    bool,
    typer.Option(
        "--accept", help="Publish below publish.target, or above publish.max_failed_share, on record."
    ),
]
AllowMix = Annotated[
    bool, typer.Option("--allow-mix", help="Let several kinds of CPU share the run, on record.")
]
KeepSamples = Annotated[
    bool, typer.Option("--keep-samples", help="Leave what the models were learned from, once published.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Read every file of the run; make again what is damaged.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List and tell; write nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress lines.")]


def announce(line: str, *, quiet: bool = False) -> None:
    """Say on stderr what begins, before seconds of imports: torch and Ray come after it."""
    if not quiet:
        logging.getLogger(ANNOUNCEMENTS).info("%s …", line)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def count_states(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none encoded yet"
