"""Image files as untrusted bytes: which format, the decoder for it, its orientation, why it failed.

Pillow's own `Image.open` is passed by on purpose: it applies a process-wide pixel limit by way of
warnings, which threads share, and reads formats nobody asked for. Here a format is known by its
first bytes and goes straight to its decoder; the size is checked by the caller before any pixel.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from ckn_scale.errors import ImageRejected

EXIF_ORIENTATION = 0x0112
EXIF_PREFIX = b"Exif\0\0"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
AVIF_BRANDS = (b"avif", b"avis")
# libjpeg writes 10 scans, mozjpeg's search ends below 20; 64 over 100 megapixels take five seconds.
MAX_JPEG_SCANS = 64
JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)  # within coded data: 00 and restarts
HEAD_BYTES = 64  # enough to distinguish the formats
QUOTED = re.compile(r"""b?(['"]).*?\1""", re.DOTALL)  # bytes of the file: a reason is shown to others
# What decoders say of a sound file that asks for something they do not do.
UNSUPPORTED = re.compile(r"unsupported|not supported|not implemented|unknown pixel mode", re.IGNORECASE)


@dataclass(frozen=True)
class FileFormat:
    """`matches` looks at the first bytes, `is_cut_off` at a whole file that could not be decoded."""

    name: str
    matches: Callable[[bytes], bool]
    decoder: Callable[[io.BytesIO], ImageFile.ImageFile]
    is_cut_off: Callable[[bytes], bool]


def open_image_file(data: bytes) -> ImageFile.ImageFile:
    """A Pillow image with its header read and its pixels not yet decoded."""
    if not data:
        raise ImageRejected("empty", "the file has no bytes")
    return _format_of(data).decoder(io.BytesIO(data))


def count_jpeg_scans(data: bytes) -> int:
    """Scans of a JPEG, up to the end of its first image; embedded thumbnails do not count.

    Each scan of a progressive file is decoded over the whole image: a few bytes of work for the sender.
    """
    if (at := data.find(b"\xff\xda")) < 0 or data.count(b"\xff\xda") <= MAX_JPEG_SCANS:
        return data.count(b"\xff\xda")  # never fewer than there are
    scans, at = 0, 2
    while (marker := JPEG_MARKER.search(data, at)) is not None and marker[1] != b"\xd9":
        at = marker.end()
        scans += marker[1] == b"\xda"
        if marker[1] != b"\x01" and at + 2 <= len(data):
            at += max(2, struct.unpack_from(">H", data, at)[0])
    return scans


def rejection_of(data: bytes, error: Exception) -> ImageRejected:
    """What to say about a file whose decoder raised `error`."""
    file_format = _format_of(data)
    said = " ".join(QUOTED.sub("…", str(error)).split()) or type(error).__name__
    reason = f"{file_format.name}: {said}"
    if UNSUPPORTED.search(said):
        return ImageRejected("unsupported", reason)
    return ImageRejected("truncated" if file_format.is_cut_off(data) else "corrupt", reason)


def orientation_of(file: ImageFile.ImageFile) -> int:
    """EXIF orientation 1 … 8; 1 where there is none or the EXIF block is corrupt."""
    if isinstance(file, TiffImagePlugin.TiffImageFile):
        value = file.tag_v2.get(EXIF_ORIENTATION, 1)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1
    exif = file.info.get("exif", b"")
    return read_exif_orientation(exif) if isinstance(exif, bytes) else 1


def read_exif_orientation(exif: bytes) -> int:
    """The orientation tag of an EXIF block, without looking at anything else in it.

    Orientation is wanted even where the rest of the block is broken, as it often is in the wild.
    """
    tiff = exif.removeprefix(EXIF_PREFIX)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (num_entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(num_entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == EXIF_ORIENTATION and kind == 3 and 1 <= value <= 8:
                return int(value)
    except struct.error:
        return 1
    return 1


def _format_of(data: bytes) -> FileFormat:
    for file_format in FORMATS:
        if file_format.matches(data[:HEAD_BYTES]):
            return file_format
    raise ImageRejected("unsupported", "its first bytes are of no format read here")


class _JpegFile(JpegImagePlugin.JpegImageFile):
    """A JPEG whose header is read without its EXIF block: Pillow wants the resolution out of it, and
    reports a broken one by warnings, which threads share."""

    def _read_dpi_from_exif(self) -> None:
        pass


def _open_jpeg(stream: io.BytesIO) -> ImageFile.ImageFile:
    if (scans := count_jpeg_scans(stream.getvalue())) > MAX_JPEG_SCANS:
        raise ImageRejected("too_large", f"its {scans} scans are more than {MAX_JPEG_SCANS}")
    return _JpegFile(stream)


def _open_heif(stream: io.BytesIO) -> ImageFile.ImageFile:
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        reason = "HEIC needs the extra pillow-heif: pip install 'ckn-scale[heif]'"
        raise ImageRejected("unsupported", reason) from None
    file: ImageFile.ImageFile = HeifImageFile(stream)
    return file


def _open_avif(stream: io.BytesIO) -> ImageFile.ImageFile:
    if not features.check("avif"):
        reason = "AVIF needs a Pillow built with libavif, as its wheels are: pip install --upgrade pillow"
        raise ImageRejected("unsupported", reason)
    return AvifImagePlugin.AvifImageFile(stream)


def _open_webp(stream: io.BytesIO) -> ImageFile.ImageFile:
    if not features.check("webp"):
        raise ImageRejected("unsupported", "this Pillow was built without WebP")
    return WebPImagePlugin.WebPImageFile(stream)


def _is_heif(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS


def _is_avif(head: bytes) -> bool:
    """The major brand may also be the general one, with AVIF among the compatible brands behind it."""
    brands = head[8 : struct.unpack_from(">I", head)[0]] if head[4:8] == b"ftyp" else b""
    return any(brand in brands for brand in AVIF_BRANDS)


def _is_jpeg_cut_off(data: bytes) -> bool:
    return b"\xff\xd9" not in data[-64:]


def _is_png_cut_off(data: bytes) -> bool:
    return b"IEND" not in data[-64:]


def _is_riff_cut_off(data: bytes) -> bool:
    return len(data) < 12 or len(data) < struct.unpack_from("<I", data, 4)[0] + 8


def _is_gif_cut_off(data: bytes) -> bool:
    return not data.rstrip(b"\0").endswith(b"\x3b")


def _is_bmp_cut_off(data: bytes) -> bool:
    return len(data) < 6 or len(data) < struct.unpack_from("<I", data, 2)[0]


def _is_tiff_cut_off(data: bytes) -> bool:
    """A directory or a strip that ends behind the end of the file."""
    try:
        ends = _tiff_ends(data)
    except struct.error:
        return True
    return any(end > len(data) for end in ends)


def _tiff_ends(data: bytes) -> list[int]:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (num_entries,) = struct.unpack_from(order + "H", data, start)
    ends = [start + 2 + 12 * num_entries]
    arrays: dict[int, tuple[int, ...]] = {}
    for entry in range(num_entries):
        tag, kind, count = struct.unpack_from(order + "HHI", data, start + 2 + 12 * entry)
        if tag in (273, 279, 324, 325) and kind in (3, 4):
            arrays[tag] = _tiff_values(data, order, start + 2 + 12 * entry + 8, kind, count)
    for offsets, counts in ((273, 279), (324, 325)):
        ends += [sum(pair) for pair in zip(arrays.get(offsets, ()), arrays.get(counts, ()), strict=False)]
    return ends


def _tiff_values(data: bytes, order: str, position: int, kind: int, count: int) -> tuple[int, ...]:
    code, width = ("H", 2) if kind == 3 else ("I", 4)
    if count * width > 4:
        (position,) = struct.unpack_from(order + "I", data, position)
    if position + count * width > len(data):
        return (len(data) + 1,)
    return struct.unpack_from(f"{order}{count}{code}", data, position)


def _is_iso_media_cut_off(data: bytes) -> bool:
    """Boxes follow each other to the end of the file; the last one must end there."""
    position = 0
    while position + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, position)
        if size == 0:  # this box reaches to the end
            return False
        if size == 1:
            size = struct.unpack_from(">Q", data, position + 8)[0] if position + 16 <= len(data) else 0
        if size < 8:
            return False
        position += size
    return position > len(data)


FORMATS = (
    FileFormat("JPEG", lambda h: h.startswith(b"\xff\xd8"), _open_jpeg, _is_jpeg_cut_off),
    FileFormat("PNG", lambda h: h.startswith(PNG_SIGNATURE), PngImagePlugin.PngImageFile, _is_png_cut_off),
    FileFormat(
        "WebP", lambda h: h[:4] == b"RIFF" and h[8:12] in (b"WEBP", b""), _open_webp, _is_riff_cut_off
    ),
    FileFormat(
        "GIF", lambda h: h.startswith((b"GIF87a", b"GIF89a")), GifImagePlugin.GifImageFile, _is_gif_cut_off
    ),
    FileFormat(
        "TIFF", lambda h: h[:4] in (b"II*\0", b"MM\0*"), TiffImagePlugin.TiffImageFile, _is_tiff_cut_off
    ),
    FileFormat("BMP", lambda h: h.startswith(b"BM"), BmpImagePlugin.BmpImageFile, _is_bmp_cut_off),
    FileFormat("AVIF", _is_avif, _open_avif, _is_iso_media_cut_off),
    FileFormat("HEIC", _is_heif, _open_heif, _is_iso_media_cut_off),
)
