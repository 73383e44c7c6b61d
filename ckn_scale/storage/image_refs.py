"""What a plan knows about an image before it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckn_scale.errors import InputError

_EXTENSIONS = "jpg jpeg jpe jfif png webp bmp tif tiff gif ppm pgm avif heic heif"
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())


class BrokenContainer(InputError):
    """A tar or Parquet file that is not whole: bad input when listed, corrupt images when read."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image: where it is, and what tells this content from another."""

    uri: str
    size_bytes: int = -1  # where the source does not tell
    etag: str = ""
    columns: dict[str, Any] | None = None  # kept columns


def extension(name: str) -> str:
    """Lower case, without the dot; empty where there is none."""
    base = name.rpartition("/")[2]
    return base.rpartition(".")[2].lower() if "." in base else ""
