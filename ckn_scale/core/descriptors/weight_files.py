"""Weights as others publish them, as arrays by name: of torch, Caffe, safetensors; no pickled code runs."""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from ckn_scale.core.descriptors.caffe_files import decode_caffemodel
from ckn_scale.errors import InputError

log = logging.getLogger(__name__)
_TORCH_FORMS = (b"PK\x03\x04", b"\x80\x02")  # a zip, or the pickles of before torch 1.6


def decode_weights(data: bytes, where: str) -> dict[str, np.ndarray]:
    """Arrays by name, those of nested dictionaries joined with dots; InputError for any other file."""
    try:
        if data.startswith(_TORCH_FORMS):
            tree = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return dict(_flatten(tree))
        if data[8:9] == b"{":
            return load_safetensors(data)
        return decode_caffemodel(data)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{where} holds no weights of torch, Caffe or safetensors ({reason})") from None


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, torch.Tensor):
        yield prefix, tree.detach().contiguous().numpy()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))


def find_layout(
    name: str, arrays: Mapping[str, np.ndarray], layouts: Sequence[Mapping[str, tuple[int, ...]]], where: str
) -> dict[str, np.ndarray]:
    """The arrays of the first layout that the file has, in float32; InputError says what is wrong."""
    problems = [_find_problem(arrays, layout) for layout in layouts]
    if None not in problems:
        raise InputError(f"{where} holds no weights of {name}: {problems[-1]}")
    layout = layouts[problems.index(None)]
    found = {key: np.ascontiguousarray(arrays[key], np.float32) for key in layout}
    infinite = [key for key, one in found.items() if not np.isfinite(one).all()]
    if infinite:
        raise InputError(f"{where} holds no weights of {name}: {infinite[0]} has values that are not finite")
    return found


def _find_problem(arrays: Mapping[str, np.ndarray], layout: Mapping[str, tuple[int, ...]]) -> str | None:
    for key, shape in layout.items():
        if key not in arrays:
            known = ", ".join(sorted(arrays)[:3]) or "nothing"
            return f"{key} is missing (it has {known} …)"
        if arrays[key].shape != shape:
            return f"{key} is {arrays[key].shape}, not {shape}"
    return None


def warn_of_other_file(data: bytes, published: Sequence[str], where: str) -> None:
    """A file of the right layout with other content than the published ones may be wanted, or broken."""
    hashes = [kind(data).hexdigest() for kind in (hashlib.sha256, hashlib.sha1)]
    if any(published) and not any(one.startswith(start) for one in hashes for start in published if start):
        log.warning(
            "%s is not the published file of these weights (sha256 %s …): well if they were trained since",
            *(where, hashes[0][:16]),
        )
