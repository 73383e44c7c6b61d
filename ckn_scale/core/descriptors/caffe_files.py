"""The weights in a `.caffemodel`, read without Caffe: the few fields of its protocol buffers that hold them.

NetParameter   2 layers (old form: V1LayerParameter), 100 layer (LayerParameter)
V1Layer        4 name, 6 blobs;   Layer: 1 name, 7 blobs
BlobProto      1…4 num, channels, height, width (old form), 5 data, 7 shape { 1 dim }
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_LAYER_FIELDS = {2: (4, 6), 100: (1, 7)}  # of the network → name and blobs of the layer
_KINDS = ("weight", "bias")


def decode_caffemodel(data: bytes) -> dict[str, np.ndarray]:
    """`conv1.weight`, `conv1.bias`, …: those of every layer that has some; ValueError for another file."""
    arrays: dict[str, np.ndarray] = {}
    for number, (name_field, blobs_field) in _LAYER_FIELDS.items():
        for layer in _read_messages(memoryview(data), number):
            name = b"".join(_read_messages(layer, name_field)).decode()
            blobs = [_decode_blob(one) for one in _read_messages(layer, blobs_field)]
            arrays |= {f"{name}.{kind}": blob for kind, blob in zip(_KINDS, blobs, strict=False)}
    if not arrays:
        raise ValueError("no layer with weights")
    return arrays


def _decode_blob(data: memoryview) -> np.ndarray:
    """In the form of torch: a vector for a bias, (outputs, inputs) for what is linear."""
    old: dict[int, int] = {}
    shape: list[int] = []
    values: list[np.ndarray] = []
    for number, value in _read_fields(data):
        if isinstance(value, int):
            old[number] = value
        elif number == 5:
            values.append(np.frombuffer(value, "<f4"))
        elif number == 7:
            shape = [size for one, packed in _read_fields(value) if one == 1 for size in _read_sizes(packed)]
    flat = np.concatenate(values) if values else np.empty(0, np.float32)
    if not shape:
        shape = [old.get(number, 1) for number in (1, 2, 3, 4)]
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
    return flat.reshape(shape).astype(np.float32)


def _read_sizes(packed: memoryview | int) -> list[int]:
    if isinstance(packed, int):
        return [packed]
    sizes, place = [], 0
    while place < len(packed):
        size, place = _read_varint(packed, place)
        sizes.append(size)
    return sizes


def _read_messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """The values of one field that are bytes: messages, texts, packed numbers."""
    for one, value in _read_fields(data):
        if one == number and not isinstance(value, int):
            yield value


def _read_fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Numbers and values of a message's fields in order; single floats as their four bytes."""
    place = 0
    while place < len(data):
        key, place = _read_varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, place = _read_varint(data, place)
            yield number, value
            continue
        if wire == _BYTES:
            length, place = _read_varint(data, place)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"no protocol buffer: wire type {wire} at byte {place}")
        if number == 0 or place + length > len(data):
            raise ValueError(f"no protocol buffer: a field ends behind byte {len(data)}")
        yield number, data[place : place + length]
        place += length


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ValueError("no protocol buffer: a number does not end")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
