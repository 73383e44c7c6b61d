"""What `import ckn_scale` offers from Python, with the command line's defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ckn_scale.config import parse_resources
from ckn_scale.errors import InputError
from ckn_scale.pipeline import IndexReport, index_images, resolve_settings
from ckn_scale.runners.driver import ProgressHook

PathLike: TypeAlias = "str | os.PathLike[str]"


def index(
    images: PathLike | Sequence[PathLike],
    run: PathLike,
    *,
    preset: str | None = None,
    config: PathLike | None = None,
    overrides: Sequence[str] = (),
    descriptor: str | None = None,
    weights: PathLike | Sequence[PathLike] = (),
    workers: int = 2,
    ray: Literal["local", "auto"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    keep: Sequence[str] = (),
    append: bool = False,
    sync: bool = False,
    undelete: bool = False,
    models: PathLike | None = None,
    background: PathLike | Sequence[PathLike] = (),
    accept: bool = False,
    keep_samples: bool = False,
    allow_mix: bool = False,
    check: bool = False,
    on_progress: ProgressHook = lambda progress: None,
) -> IndexReport:
    """Index images into the run folder `run` and publish them; called again, it goes on where it stopped.

    Args:
        images: a folder, glob, image, list (txt, csv, parquet), tar or Parquet file of images, on disk or any
            store that fsspec knows, as str or Path; or a list of these.
        run: a folder or `s3://bucket/run`.
        preset, config, overrides: the settings: a preset, a TOML file over it, "key.path=value" over both.
            Without a preset a run that is there goes on with its own settings, a new one with "fast".
        descriptor, weights: what describes patches instead of the preset's channels ("rootsift"), and files
            (or "tfeat=file") of what takes weights.
        workers: processes (0: this one) or, with `ray`, actors; the result is the same.
        ray: "local" starts a Ray of its own, "auto" uses the cluster this runs in.
        device: fixed when the run is planned; "auto" takes cuda where the workers' torch sees it.
        keep: columns of the list that hits carry.
        append: add what `images` has beyond the run's plan.
        sync: follow `images`: add what is new, replace what changed, delete what is gone from it.
        undelete: with either, add again what was deleted by hand and `images` has.
        models: another run, whose models are used instead of learning some.
        background: photographs of other things (or another run), not indexed, from which it is learned what
            all images share.
        accept: publish below the gate's target, on record.
        keep_samples: leave what the models were learned from in the run.
        allow_mix: let workers on several kinds of CPU share the run, on record.
        check: read every file of the run and rebuild what is damaged.
        on_progress: called with a `Progress` after every shard, and within shards as images are done.

    Returns an IndexReport: version, images by state, and what each step did.
    Raises InputError (SettingsError, RunMismatch, …) when an argument is wrong, and RunFailed when shards
    failed, the gate was not passed or too many images were unusable.
    """
    models = None if models is None else os.fspath(models)
    config = None if config is None else os.fspath(config)
    run = os.fspath(run)
    files = [weights] if isinstance(weights, str | os.PathLike) else weights
    settings = resolve_settings(
        *(run, preset, config, overrides),
        descriptor=descriptor,
        weights=[os.fspath(one) for one in files],
        device=device,
        ray=ray,
        models=models,
    )
    return index_images(
        _as_source(images),
        run,
        settings,
        parse_resources({"workers": workers, "ray": ray}),
        keep=keep,
        append=append,
        sync=sync,
        undelete=undelete,
        models=models,
        background=_as_source(background) if background else (),
        accept=accept,
        keep_samples=keep_samples,
        mix=allow_mix,
        check_all=check,
        on_progress=on_progress,
    )


def _as_source(images: PathLike | Sequence[PathLike]) -> str | list[str]:
    if isinstance(images, str | os.PathLike):
        return os.fspath(images)
    if isinstance(images, list | tuple) and all(isinstance(one, str | os.PathLike) for one in images):
        return [os.fspath(one) for one in images]
    kinds = (
        {type(one).__name__ for one in images}
        if isinstance(images, list | tuple)
        else {type(images).__name__}
    )
    raise InputError(f"images must be a path, a URI or a list of them, got {', '.join(sorted(kinds))}")
