"""Tars that lie about themselves: the scan ends, and every span lies inside the file."""

from __future__ import annotations

import io
import random
import tarfile

import pytest
from image_files import tar_bytes

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.storage.image_sources import list_images, read_image
from ckn_scale.storage.tars import HEADER_BYTES, BrokenTar, TarMember, scan_members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
PLAIN = {"a.jpg": b"a" * 700, "b.jpg": b"b" * 100, "c.jpg": b"c" * 513}


def scan(data: bytes) -> list[TarMember]:
    """As `scan_members`, but a scan that takes more steps than there are blocks fails."""
    steps_left = 2 * len(data) // HEADER_BYTES + 2

    def read_at(start: int, length: int) -> bytes:
        nonlocal steps_left
        steps_left -= 1
        assert steps_left > 0, "the scan does not advance"
        assert min(start, length) >= 0
        return data[start : start + length]

    return list(scan_members(read_at, len(data)))


def with_header(data: bytes, position: int, **fields: bytes) -> bytes:
    """The tar with other fields in one header, whose checksum is right again."""
    places = {"name": 0, "size": 124, "type": 156, "goes_on": 482}
    block = bytearray(data[position : position + HEADER_BYTES])
    for name, value in fields.items():
        block[places[name] : places[name] + len(value)] = value
    return data[:position] + with_checksum(block) + data[position + HEADER_BYTES :]


def with_checksum(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def base_256(number: int) -> bytes:
    return (number & ((1 << 96) - 1) | (0x80 << 88 if number >= 0 else 0)).to_bytes(12, "big")


def pax_tar(fields: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in PLAIN.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = fields if name == "b.jpg" else {}
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("format", FORMATS)
def test_scan_members_finds_what_tarfile_finds(format):
    members = {**PLAIN, "n" * 90 + "/" + "m" * 60 + ".jpg": b"long", "ü.jpg": b"", "d/e.txt": b"x" * 512}
    data = tar_bytes(members, FORMATS[format])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [TarMember(info.name, info.offset_data, info.size) for info in archive]
    assert scan(data) == expected
    assert [data[m.start : m.start + m.size] for m in expected] == list(members.values())


BROKEN = {
    "negative": with_header(tar_bytes(PLAIN), 0, size=base_256(-512)),
    "back to the start": with_header(tar_bytes(PLAIN), 1536, size=base_256(-2048)),
    "back to itself": with_header(tar_bytes(PLAIN), 1536, size=base_256(-512)),
    "minus in octal": with_header(tar_bytes(PLAIN), 0, size=b"-0000001000\0"),
    "past the end": with_header(tar_bytes(PLAIN), 0, size=base_256(1 << 60)),
    "no number": with_header(tar_bytes(PLAIN), 0, size=b"abcdefghijk\0"),
    "negative long name": with_header(tar_bytes(PLAIN), 0, type=b"L", size=base_256(-512)),
    "negative pax header": with_header(tar_bytes(PLAIN), 0, type=b"x", size=base_256(-1)),
    "pax that is none": with_header(tar_bytes(PLAIN), 0, type=b"x"),
    "pax size negative": pax_tar({"size": "-512"}),
    "pax size huge": pax_tar({"size": "9" * 18}),
    "pax size no number": pax_tar({"size": "1e3"}),
    "endless sparse map": with_header(
        b"".join([tar_bytes(PLAIN)[:512], b"\xff" * 5120]), 0, type=b"S", goes_on=b"\x01"
    ),
    "bad checksum in the middle": tar_bytes(PLAIN)[:1536] + b"\xff" * 512 + tar_bytes(PLAIN)[2048:],
}


@pytest.mark.parametrize("name", BROKEN)
def test_tar_that_does_not_add_up_is_broken_by_its_name(tmp_path, name):
    with pytest.raises(BrokenTar):
        scan(BROKEN[name])
    path = tmp_path / "0.tar"
    path.write_bytes(BROKEN[name])
    with pytest.raises(InputError, match=r"0\.tar is not a whole tar file"):
        list(list_images(str(path)))
    with pytest.raises(ImageRejected) as caught:
        read_image(f"{path}#c.jpg")
    assert caught.value.state == "corrupt"


def test_extended_header_of_a_gigabyte_is_not_read():
    block = with_header(tar_bytes(PLAIN)[:512], 0, type=b"x", size=base_256(1 << 30))
    reads = []
    with pytest.raises(BrokenTar, match="extended header"):
        list(scan_members(lambda start, length: reads.append(length) or block, 1 << 31))
    assert reads == [HEADER_BYTES]


def test_pax_size_stands_for_the_headers(tmp_path):
    path = tmp_path / "0.tar"
    data = pax_tar({"size": "100"})
    position = data.index(b"b.jpg\0")
    path.write_bytes(with_header(data, position, size=b"00000000000\0"))
    refs = {ref.uri: ref for ref in list_images(str(path))}
    assert [ref.size_bytes for ref in refs.values()] == [700, 100, 513]
    assert read_image(f"{path}#b.jpg", etag=refs[f"{path}#b.jpg"].etag) == b"b" * 100


def test_sparse_member_is_listed_and_not_read_as_something_else(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(with_header(tar_bytes(PLAIN), 0, type=b"S"))
    refs = list(list_images(str(path)))
    assert [ref.uri for ref in refs] == [f"{path}#{name}" for name in PLAIN]
    with pytest.raises(ImageRejected, match="sparse") as caught:
        read_image(refs[0].uri, etag=refs[0].etag)
    assert caught.value.state == "unsupported"
    assert read_image(refs[1].uri, etag=refs[1].etag) == PLAIN["b.jpg"]


def test_member_whose_name_is_not_utf8_is_read(tmp_path):
    path = tmp_path / "0.tar"
    path.write_bytes(with_header(tar_bytes(PLAIN), 0, name=b"\xe9.jpg"))
    first = next(iter(list_images(str(path))))
    assert first.uri == f"{path}#\\xe9.jpg"
    assert read_image(first.uri, etag=first.etag) == read_image(first.uri) == PLAIN["a.jpg"]


def test_member_name_never_leads_to_another_file(tmp_path):
    """`0.tar#../secret/1.tar#x.jpg` is a member of 0.tar, whatever it looks like."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "1.tar").write_bytes(tar_bytes({"x.jpg": b"secret"}))
    (tmp_path / "open").mkdir()
    path = tmp_path / "open" / "0.tar"
    path.write_bytes(tar_bytes({"../../secret/1.tar#x.jpg": b"mine"}))
    (ref,) = list_images(str(path))
    assert read_image(ref.uri) == b"mine"


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few bytes of some headers changed, with and without a right checksum; now and then cut or doubled."""
    for _ in range(rng.randint(1, 4)):
        position = HEADER_BYTES * rng.randrange(max(len(data) // HEADER_BYTES, 1))
        block = bytearray(data[position : position + HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        for _ in range(rng.randint(1, 6)):
            block[rng.choice([rng.randrange(HEADER_BYTES), rng.randint(124, 135), 156, 482])] = rng.choice(
                [0, 0x30, 0x2D, 0x80, 0xFF, 0x4C, 0x53, 0x78, 0x67, rng.randrange(256)]
            )
        changed = with_checksum(block) if rng.random() < 0.8 else bytes(block)
        data = data[:position] + changed + data[position + HEADER_BYTES :]
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    return data


@pytest.mark.parametrize("format", FORMATS)
def test_mutated_tars_end_and_stay_inside_the_file(format):
    members = {**PLAIN, "n" * 90 + "/" + "m" * 60 + ".jpg": b"long", "ü.jpg": b"u", "d/e.json": b"{}"}
    whole = tar_bytes(members, FORMATS[format]).rstrip(b"\0") + bytes(1024)
    whole += -len(whole) % HEADER_BYTES * b"\0"
    rng = random.Random(0)
    outcomes = {"broken": 0, "read": 0}
    for _ in range(3000):
        data = mutate(whole, rng)
        try:
            found = scan(data)
        except BrokenTar:
            outcomes["broken"] += 1
            continue
        outcomes["read"] += 1
        ends = [0, *(member.start + member.size for member in found)]
        assert ends[-1] <= len(data)
        assert all(end <= member.start for end, member in zip(ends, found, strict=False))
    assert min(outcomes.values()) > 100, outcomes  # else the mutations are too tame, or too wild
