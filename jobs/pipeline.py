"""The whole path as one Ray job: plan, sample, train, encode, build, certify, publish.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/pipeline.py s3://bucket/photos s3://bucket/run --workers 16

The job may be submitted again at any time: it goes on where it stopped. `--preset`, `--config` and
`--set` are those of `ckn-scale index`.
"""

from __future__ import annotations

import argparse
import logging
import sys

from ckn_scale.config import Resources
from ckn_scale.errors import CknScaleError
from ckn_scale.pipeline import index_images, resolve_settings
from ckn_scale.runners.driver import Progress


def run_pipeline(arguments: argparse.Namespace) -> None:
    settings = resolve_settings(
        arguments.run,
        arguments.preset,
        arguments.config,
        arguments.override,
        device=arguments.device,
        ray="auto",
    )
    resources = Resources(workers=arguments.workers, ray="auto", gpus_per_worker=arguments.gpus_per_worker)
    report = index_images(
        arguments.images,
        arguments.run,
        settings,
        resources,
        append=arguments.append,
        background=arguments.background,
        accept=arguments.accept,
        keep_samples=arguments.keep_samples,
        mix=arguments.allow_mix,
        on_progress=log_progress,
    )
    logging.info("version %d of %s: %s", report.version, report.run, report.states)


def log_progress(progress: Progress) -> None:
    if progress.done == progress.total:
        logging.info("%s: %d shards, %d images", progress.step, progress.total, progress.images)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", help="a folder, glob, list, tar or Parquet file that every node can read")
    parser.add_argument("run", help="the run folder, on a store that every node can write")
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--config")
    parser.add_argument("--set", dest="override", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="settled by the plan"
    )
    parser.add_argument("--gpus-per-worker", type=float, default=1.0, help="with --device cuda")
    parser.add_argument("--background", action="append", default=[], help="other photographs; may repeat")
    parser.add_argument("--append", action="store_true", help="add what IMAGES has beyond the run's plan")
    parser.add_argument("--accept", action="store_true", help="publish what a gate refused, on record")
    parser.add_argument("--keep-samples", action="store_true", help="what was learned from stays in the run")
    parser.add_argument("--allow-mix", action="store_true", help="let several kinds of CPU share the run")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    try:
        run_pipeline(parse_arguments())
    except CknScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
