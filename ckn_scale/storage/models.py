"""Models as safetensors files named by their content; nothing is ever unpickled.

The description travels in the file's own metadata, so one sha256 covers arrays and description; the
JSON beside it is a copy for people.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.store import Store

logger = logging.getLogger(__name__)
FORMAT = 1
_KEY = "ckn_scale"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_FILE_NAME = re.compile(r"(?P<name>.+)-(?P<sha16>[0-9a-f]{16})\.safetensors")
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ModelFile:
    name: str
    path: str
    sha256: str


def save_model(
    store: Store, name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> ModelFile:
    """Write a model under a name made of its content; again, it changes nothing or mends a damaged file."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a model's name has lower-case letters, digits, '_', '.', '-' only, got {name!r}")
    data = _encode(name, arrays, meta)
    sha256 = hashlib.sha256(data).hexdigest()
    file = ModelFile(name, f"models/{name}-{sha256[:16]}.safetensors", sha256)
    _write(store, file.path, data)
    _write(store, file.path.removesuffix("safetensors") + "json", _describe(file, arrays, meta))
    return file


def _write(store: Store, path: str, data: bytes) -> None:
    """Other bytes under a name that is the hash of these are damage, so replacing them loses nothing."""
    try:
        store.write_new(path, data)
    except FileExistsError as error:
        logger.warning("%s: it was damaged and is written again", error)
        store.delete(path)
        store.write_new(path, data)


def load_model(store: Store, file: ModelFile) -> tuple[Arrays, dict[str, Any]]:
    """(arrays, meta) of a recorded model; CorruptData when its bytes are not the recorded ones."""
    where = store.address(file.path)
    try:
        data = store.read(file.path)
    except FileNotFoundError as error:
        raise CorruptData(f"the model {file.name} is gone: {where} does not exist") from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CorruptData(f"the model {file.name} is damaged: the sha256 of {where} is not the recorded one")
    name, arrays, meta = decode_model(data, where)
    if name != file.name:
        raise InputError(f"{where} holds the model {name}, not {file.name}")
    return arrays, meta


def find_model(store: Store, path: str) -> ModelFile:
    """The model at `path`, as a user names it: InputError when there is none or it is not one of ours."""
    where = store.address(path)
    try:
        data = store.read(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(f"there is no model file at {where}") from error
    try:
        name, _, _ = decode_model(data, where)
    except CorruptData as error:
        raise InputError(str(error)) from error
    sha256 = hashlib.sha256(data).hexdigest()
    match = _FILE_NAME.fullmatch(path.rpartition("/")[2])
    if match and match["sha16"] != sha256[:16]:
        raise InputError(f"{where} is damaged: its content does not fit the hash in its name")
    return ModelFile(name, path, sha256)


def decode_model(data: bytes, where: str) -> tuple[str, Arrays, dict[str, Any]]:
    """(name, arrays, meta); CorruptData when the bytes are not a whole model file of ours."""
    try:
        arrays = load_arrays(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        description = json.loads(header["__metadata__"][_KEY])
        name, meta = description["name"], description["meta"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptData(
            f"{where} is not a whole ckn_scale model ({type(error).__name__}: {error})"
        ) from error
    if description.get("format") != FORMAT:
        raise CorruptData(
            f"{where} has model format {description.get('format')}, this version reads {FORMAT}"
        )
    return name, arrays, meta


def _encode(name: str, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bytes:
    description = {"format": FORMAT, "name": name, "meta": dict(meta)}
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
    plain = {key: np.ascontiguousarray(value) for key, value in sorted(arrays.items())}
    return save_arrays(plain, metadata={_KEY: text})


def _describe(file: ModelFile, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bytes:
    shapes = {key: {"dtype": str(value.dtype), "shape": list(value.shape)} for key, value in arrays.items()}
    body = {"name": file.name, "sha256": file.sha256, "meta": dict(meta), "arrays": shapes}
    return json.dumps(body, sort_keys=True, indent=1).encode()
