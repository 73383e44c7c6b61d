"""What an image is budgeted with before it is decoded bounds what decoding takes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ckn_scale.core.images import decoding_bytes


def encode(image: np.ndarray, file_format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, file_format, **options)
    return stream.getvalue()


def measure_peak_bytes(data: bytes, path: Path) -> int:
    """What decoding adds to the peak memory of a process of its own."""
    path.write_bytes(data)
    code = """
import re, sys
from pathlib import Path
from ckn_scale.core.images import decode_image
from ckn_scale.core.specs import ImageSpec
data = Path(sys.argv[1]).read_bytes()
peak_kb = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kb()
decode_image(data, ImageSpec())
print(peak_kb() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return 1024 * int(done.stdout)


@pytest.mark.parametrize("kind", ["float", "RGBA", "16 bit", "progressive", "WebP"])
def test_decoding_bytes_bounds_what_decoding_takes(kind: str, tmp_path: Path) -> None:
    side_px = 3000
    grey = np.tile(np.linspace(0, 255, side_px, dtype=np.float32), (side_px, 1))
    rgb = np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
    data = {
        "float": lambda: encode(grey, "TIFF"),
        "RGBA": lambda: encode(np.dstack([rgb, rgb[..., 0]]), "PNG", compress_level=1),
        "16 bit": lambda: encode(grey.astype(np.uint16) * 257, "PNG", compress_level=1),
        "progressive": lambda: encode(rgb, "JPEG", progressive=True, subsampling=0),
        "WebP": lambda: encode(rgb, "WEBP", quality=50, method=0),
    }[kind]()
    margin = 24 << 20  # bands, and what a decoder keeps whatever the size
    assert measure_peak_bytes(data, tmp_path / "image") <= decoding_bytes(data) + margin
