"""Images made to hurt whoever decodes them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def slow_image() -> bytes:
    """As many scans over as many pixels as are let through: some seconds of decoding."""
    sink = io.BytesIO()
    Image.fromarray(np.full((9900, 9900), 90, np.uint8)).save(sink, "JPEG", progressive=True)
    jpeg = sink.getvalue()
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (64 - jpeg.count(b"\xff\xda")) + b"\xff\xd9"
