"""Read one planned image and prepare it; what is wrong with the bytes becomes an ImageRejected."""

from __future__ import annotations

from ckn_scale.core.encoder import Front, PreparedImage
from ckn_scale.errors import ImageRejected
from ckn_scale.steps.failpoints import meet_image
from ckn_scale.steps.plan import PlannedImage
from ckn_scale.storage.image_sources import read_image


def prepare_image(image: PlannedImage, front: Front) -> PreparedImage | ImageRejected:
    """Rejections are returned; transient store errors are raised and fail the shard."""
    meet_image(image.uri)
    try:
        return front.prepare(read_planned(image))
    except ImageRejected as rejected:
        return rejected


def read_planned(image: PlannedImage) -> bytes:
    """The bytes the plan listed; ImageRejected when they are gone or have changed."""
    data = read_image(image.uri, etag=image.etag)
    if image.size_bytes not in (-1, len(data)):
        raise ImageRejected("changed", f"planned with {image.size_bytes} bytes, now {len(data)}")
    return data
