"""What `import ckn_scale` offers from Python, with the command line's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckn_scale.config import Resources
from ckn_scale.runners.base import ProgressHook
from ckn_scale.runners.devices import settle_settings
from ckn_scale.runners.index_images import IndexReport, index_images


def index(
    images: str | Sequence[str],
    run: str,
    *,
    preset: str = "compact",
    config: str | None = None,
    overrides: Sequence[str] = (),
    workers: int = 2,
    ray: Literal["local", "auto"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    keep: Sequence[str] = (),
    append: bool = False,
    models: str | None = None,
    accept: bool = False,
    check: bool = False,
    on_progress: ProgressHook = lambda progress: None,
) -> IndexReport:
    """Index a folder, glob, list, tar or Parquet file of images into `run`; resumable.

    `append` adds what `images` has beyond the run's plan; `models` takes over another run's models;
    `device` is settled when the run is planned: auto takes cuda where the workers' torch sees it.
    `check` reads every file of the run and makes again what is damaged.
    Raises WorkFailed when shards failed, the gate was not passed or too many images were unusable.
    """
    settings = settle_settings(run, preset, config, overrides, device=device, ray=ray, models=models)
    return index_images(
        images,
        run,
        settings,
        Resources(workers=workers, ray=ray),
        keep=keep,
        append=append,
        models=models,
        accept=accept,
        check_all=check,
        on_progress=on_progress,
    )
