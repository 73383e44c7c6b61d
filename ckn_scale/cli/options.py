"""Arguments and options that several verbs share, each declared once, alone or in a group.

A verb takes a group as one argument (`workers: WorkerOptions`); `spread_options` shows its fields to typer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckn_scale.cli.output import announce

if TYPE_CHECKING:
    from ckn_scale.config import Resources, Settings
    from ckn_scale.runners.driver import Driver

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run folder: a path or s3://bucket/prefix.")]
Images = Annotated[
    str,
    typer.Argument(metavar="IMAGES", help="A folder, glob, list (txt, csv, parquet) or tar."),
]
Ray = Annotated[
    Literal["local", "auto"] | None,
    typer.Option(help="local: a Ray of its own; auto: the cluster this runs in."),
]
Background = Annotated[
    list[str] | None,
    typer.Option(
        help="Photographs of other things (a folder, glob, list, tar, or another run), not indexed, from "
        "which it is learned what all images share; may repeat."
    ),
]
Accept = Annotated[
    bool,
    typer.Option(
        "--accept",
        help="Publish below publish.target, or above publish.max_failed_share, on record; let --sync delete "
        "more than publish.max_gone_share.",
    ),
]
KeepSamples = Annotated[
    bool, typer.Option("--keep-samples", help="Leave what the models were learned from, once published.")
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]FILE", help="The weights of a descriptor that takes some (tfeat=FILE); may repeat."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class SettingsOptions:
    """What is computed: a preset, a file over it, single values over both."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="Named settings: fast, compact, paper, tiny. By default fast, or those of the run.",
            show_default=False,
        ),
    ] = None
    config: Annotated[
        str | None, typer.Option("--config", help="A TOML file of settings over the preset.")
    ] = None
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value, over all; may repeat.")
    ] = None

    def load(self, *overrides: str, preset: str | None = None) -> Settings:
        """The settings as named, with `overrides` over them; those of another `preset` where one is given."""
        from ckn_scale.config import DEFAULT_PRESET, load_settings

        chosen = preset or self.preset or DEFAULT_PRESET
        return load_settings(chosen, self.config, [*(self.override or []), *overrides])


@dataclass(frozen=True)
class PlanOptions(SettingsOptions):
    """What a run is planned with, and keeps."""

    descriptor: Annotated[
        str | None,
        typer.Option(
            help="What describes patches instead of the preset's channels: rootsift, tfeat, ckn-mix, a+b …"
        ),
    ] = None
    weights: Weights = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Where the run computes, fixed by its plan; auto: cuda where workers see one."),
    ] = "auto"
    models: Annotated[
        str | None, typer.Option(help="A run, or its models/000001.json, to take the models of.")
    ] = None
    background: Background = None
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A column of the list that hits carry; may repeat. Fixed by the run's plan."),
    ] = None
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Add what IMAGES has beyond the run's plan; without it IMAGES must be the run's own.",
        ),
    ] = False
    sync: Annotated[
        bool,
        typer.Option(
            "--sync",
            help="Follow IMAGES: add what is new, replace what changed, delete what is gone from it.",
        ),
    ] = False
    undelete: Annotated[
        bool,
        typer.Option(
            "--undelete", help="With --append or --sync: add again what `delete` removed and IMAGES has."
        ),
    ] = False

    def resolve(self, run: str, ray: str | None) -> Settings:
        """The settings with those of `--models` and with the device that workers will compute on."""
        from ckn_scale.pipeline import resolve_settings

        return resolve_settings(
            *(run, self.preset, self.config, self.override or []),
            descriptor=self.descriptor,
            weights=self.weights or [],
            device=self.device,
            ray=ray,
            models=self.models,
        )

    def arguments(self) -> dict[str, Any]:
        """What `pipeline.plan` takes beside images, run and settings."""
        return {
            "keep": self.keep or [],
            "append": self.append,
            "sync": self.sync,
            "undelete": self.undelete,
            "models": self.models,
            "background": self.background or [],
        }


@dataclass(frozen=True)
class WorkerOptions:
    """How the work is done; never changes a byte of the result."""

    workers: Annotated[int, typer.Option(min=0, help="Processes or Ray actors; 0: this process itself.")] = 2
    ray: Ray = None
    gpus_per_worker: Annotated[
        float, typer.Option(help="Of each Ray actor, with --device cuda; may be a fraction.")
    ] = 1.0
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False

    def resources(self) -> Resources:
        from ckn_scale.config import parse_resources

        return parse_resources(
            {"workers": self.workers, "ray": self.ray, "gpus_per_worker": self.gpus_per_worker}
        )

    @contextmanager
    def open_driver(self, run: str) -> Iterator[Driver]:
        """The driver of an existing run with these workers, its progress shown on stderr."""
        announce(f"opening {run}", quiet=self.quiet)
        from ckn_scale.cli.progress import ProgressDisplay
        from ckn_scale.runners.driver import open_driver
        from ckn_scale.storage.run_folder import RunFolder

        opened = RunFolder.open(run)
        with (
            ProgressDisplay(quiet=self.quiet) as display,
            open_driver(opened, self.resources(), display.show_step) as driver,
        ):
            yield driver


def spread_options(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with the fields of each group that it takes as arguments of their own, as typer wants them."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    groups = {
        name: one.annotation
        for name, one in parameters.items()
        if isinstance(one.annotation, type) and is_dataclass(one.annotation)
    }

    @functools.wraps(verb)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        verb(**values)

    spread = []
    for name, one in parameters.items():
        members = inspect.signature(groups[name], eval_str=True).parameters if name in groups else {name: one}
        spread += [member.replace(kind=inspect.Parameter.KEYWORD_ONLY) for member in members.values()]
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return call
