"""Whether workers see what the driver sees: a fresh secret in the run folder, and one image."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.steps.plan import PlannedImage, PlanReader, require_segments
from ckn_scale.storage.http_images import is_http
from ckn_scale.storage.image_sources import image_exists, read_image
from ckn_scale.storage.run_folder import RunFolder, is_run

IMAGES_TRIED = 10  # of the first shard: images may have been removed since the plan


class Sight(NamedTuple):
    nonce: str
    image_uri: str  # empty: the driver sees none itself


@contextmanager
def show_sight(run: RunFolder) -> Iterator[Sight]:
    """Put a secret into the run for workers to read back, as long as there may be new workers."""
    images = PlanReader(run, require_segments(run)).read_shard(0)
    nonce = run.write_nonce()
    try:
        yield Sight(nonce, _find_visible(images[:IMAGES_TRIED]))
    finally:
        run.remove_nonce(nonce)


def _find_visible(images: Sequence[PlannedImage]) -> str:
    """Not on the web: what a host there says to one worker tells nothing of what it says to another."""
    stored = (image.uri for image in images if not is_http(image.uri))
    return next((uri for uri in stored if image_exists(uri)), "")


def open_seen(run_url: str, sight: Sight) -> RunFolder:
    """The run; InputError, naming host and path, unless this process sees the driver's run and images."""
    host = socket.gethostname()
    if not is_run(run_url):
        raise InputError(
            f"host {host} does not see the run at {run_url}: use a folder that all hosts share, or s3://"
        )
    run = RunFolder.open(run_url)
    run.check_nonce(sight.nonce)
    try:
        if sight.image_uri:
            read_image(sight.image_uri)
    except ImageRejected as rejected:
        if rejected.state == "missing":
            raise InputError(
                f"host {host} does not see the image {sight.image_uri}: all workers must be able to read it"
            ) from None
    return run
