"""Image files as they come from strangers: made here, byte by byte, from a few good ones."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image


def make_photo(height_px: int = 96, width_px: int = 128) -> np.ndarray:
    """(H, W, 3) uint8: smooth colour with some noise, so that every codec has something to do."""
    y, x = np.mgrid[:height_px, :width_px]
    smooth = np.stack([x * 255 / width_px, y * 255 / height_px, (x + y) % 256], axis=2)
    return np.clip(smooth + np.random.default_rng(0).normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)


def encode(image: np.ndarray | Image.Image, file_format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(stream, file_format, **options)
    return stream.getvalue()


def jpeg_segments(data: bytes) -> list[int]:
    """Positions of all markers up to the start of the scan."""
    positions, at = [0], 2
    while data[at + 1] != 0xDA:
        positions.append(at)
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return [*positions, at]


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_chunks(data: bytes) -> list[int]:
    positions, at = [], 8
    while at < len(data):
        positions.append(at)
        at += 12 + struct.unpack_from(">I", data, at)[0]
    return positions


def png_header(width_px: int, height_px: int) -> bytes:
    """A PNG that promises many pixels and holds none of them."""
    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", body), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def exif_block(orientation: int, order: str = "<") -> bytes:
    mark = b"II" if order == "<" else b"MM"
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "HIH", 42, 8, 1) + entry + struct.pack(order + "I", 0)


def truncated_files() -> Iterator[tuple[str, bytes]]:
    """Every format, cut off at each place where its structure changes."""
    photo = make_photo()
    for name, options in (("baseline", {}), ("progressive", {"progressive": True})):
        jpeg = encode(photo, "JPEG", **options)
        for position in jpeg_segments(jpeg)[1:]:
            yield f"{name} JPEG before marker {jpeg[position + 1]:02x} at {position}", jpeg[:position]
            yield f"{name} JPEG inside marker {jpeg[position + 1]:02x} at {position}", jpeg[: position + 5]
        for share in (0.5, 0.9):
            yield f"{name} JPEG at {share}", jpeg[: int(len(jpeg) * share)]
    png = encode(photo, "PNG")
    for position in png_chunks(png)[:-1]:
        kind = png[position + 4 : position + 8].decode()
        yield f"PNG before {kind}", png[:position]
        yield f"PNG inside {kind}", png[: position + 10]
    yield "PNG in the middle", png[: len(png) // 2]
    others = {
        "WEBP": encode(photo, "WEBP"),
        "lossless WEBP": encode(photo, "WEBP", lossless=True),
        "TIFF": encode(photo, "TIFF"),
        "LZW TIFF": encode(photo, "TIFF", compression="tiff_lzw"),
        "BMP": encode(photo, "BMP"),
        "GIF": encode(photo, "GIF"),
    }
    for name, data in others.items():
        for position in (12, 30, 60, len(data) // 2, len(data) - 20):
            yield f"{name} at {position}", data[:position]


def corrupt_files() -> Iterator[tuple[str, bytes]]:
    """Whole files with a wrong inside."""
    photo = make_photo()
    png = bytearray(encode(photo, "PNG"))
    ihdr_crc = bytearray(png)
    ihdr_crc[29] ^= 0xFF
    yield "PNG with a wrong header checksum", bytes(ihdr_crc)
    noise = bytearray(png)
    noise[60:200] = bytes(140)
    yield "PNG with zeros in its data", bytes(noise)
    yield "PNG of no size", png_header(0, 10)
    jpeg = encode(photo, "JPEG")
    yield "JPEG of markers only", b"\xff\xd8\xff\xd9"
    no_tables = jpeg[:2] + jpeg[jpeg_segments(jpeg)[-1] :]
    yield "JPEG without tables", no_tables
    webp = bytearray(encode(photo, "WEBP"))
    webp[20:60] = bytes(40)
    yield "WEBP with zeros in its data", bytes(webp)
    tiff = bytearray(encode(photo, "TIFF"))
    tiff[8:10] = b"\0\0"
    yield "TIFF without tags", bytes(tiff)


def unsupported_files() -> Iterator[tuple[str, bytes]]:
    yield "text", b"this is no image at all, but it is long enough"
    yield "HTML error page named .jpg", b"<html><body>404 Not Found</body></html>"
    yield "PDF", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"
    yield "SVG", b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "PPM", b"P6 2 2 255\n" + bytes(12)
    yield "EPS, which Pillow would hand to another program", b"%!PS-Adobe-3.0 EPSF-3.0\n"
    yield "one byte", b"\xff"
    yield "zeros", bytes(1000)
    photo = make_photo()
    for what, position, value in (("header", 14, 7), ("compression", 30, 5)):
        bmp = bytearray(encode(photo, "BMP"))
        bmp[position : position + 4] = struct.pack("<I", value)
        yield f"BMP with an unknown {what}", bytes(bmp)
    yield "LAB TIFF", encode(Image.frombytes("LAB", (128, 96), photo.tobytes()), "TIFF")
    yield "RIFF sound", b"RIFF\x24\x00\x00\x00WAVEfmt "
    yield "MP4 film", b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2"


def odd_files() -> Iterator[tuple[str, bytes, tuple[int, int]]]:
    """Files that must decode, with the (height, width) of their working image at the default settings."""
    photo = make_photo(150, 200)
    grey = photo[..., 1]
    yield "progressive JPEG", encode(photo, "JPEG", progressive=True), (150, 200)
    yield "grey JPEG", encode(grey, "JPEG"), (150, 200)
    yield "CMYK JPEG", encode(Image.fromarray(photo).convert("CMYK"), "JPEG"), (150, 200)
    yield "JPEG with rubbish behind it", encode(photo, "JPEG") + b"rubbish" * 9, (150, 200)
    yield "JPEG with corrupt EXIF", encode(photo, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f"), (150, 200)
    yield "JPEG with EXIF of rubbish", encode(photo, "JPEG", exif=b"Exif\0\0" + b"\x13" * 99), (150, 200)
    yield "JPEG turned by EXIF", encode(photo, "JPEG", exif=exif_block(6)), (200, 150)
    yield "PNG turned by EXIF", encode(photo, "PNG", exif=exif_block(8, ">")), (200, 150)
    yield "palette PNG", encode(Image.fromarray(photo).convert("P"), "PNG"), (150, 200)
    yield (
        "palette PNG with transparency",
        encode(_palette_with_hole(photo), "PNG", transparency=3),
        (150, 200),
    )
    yield "bilevel PNG", encode(Image.fromarray(grey).convert("1"), "PNG"), (150, 200)
    yield "16-bit PNG", encode(grey.astype(np.uint16) * 257, "PNG"), (150, 200)
    yield "grey PNG with alpha", encode(Image.fromarray(photo).convert("LA"), "PNG"), (150, 200)
    yield "interlaced size 1 × 1", encode(photo[:1, :1], "PNG"), (4, 4)
    yield "1 × 20000", encode(np.zeros((1, 20_000), np.uint8), "PNG"), (1, 32_000)
    yield "20000 × 1", encode(np.zeros((20_000, 1), np.uint8), "PNG"), (32_000, 1)
    yield "animated GIF", _animate(photo, "GIF"), (150, 200)
    yield "animated WEBP", _animate(photo, "WEBP"), (150, 200)
    yield "animated PNG", _animate(photo, "PNG"), (150, 200)
    yield "16-bit TIFF", encode(grey.astype(np.uint16) * 257, "TIFF"), (150, 200)
    yield "float TIFF", encode(grey.astype(np.float32) / 255, "TIFF"), (150, 200)
    yield "32-bit TIFF", encode(grey.astype(np.int32), "TIFF"), (150, 200)
    yield "CMYK TIFF", encode(Image.fromarray(photo).convert("CMYK"), "TIFF"), (150, 200)
    yield "TIFF of several pages", _animate(photo, "TIFF"), (150, 200)
    yield "BMP with a palette", encode(Image.fromarray(photo).convert("P"), "BMP"), (150, 200)
    yield "AVIF", encode(photo, "AVIF"), (150, 200)


def _palette_with_hole(photo: np.ndarray) -> Image.Image:
    return Image.fromarray(photo).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)


def _animate(photo: np.ndarray, file_format: str) -> bytes:
    frames = [Image.fromarray(photo), Image.fromarray(255 - photo), Image.fromarray(photo[::-1])]
    return encode(frames[0], file_format, save_all=True, append_images=frames[1:])
