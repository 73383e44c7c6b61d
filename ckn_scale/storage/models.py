"""Models as safetensors files named by their content, and which of them a run uses. Nothing is unpickled.

The description travels in the file's own metadata, so one sha256 covers arrays and description; the
JSON beside it is a copy for people. While a run learns, commits of training shards name its models;
afterwards one generation record does, and encoding and queries load that, never "the latest file".
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from ckn_scale.core.model_parts import ModelPart
from ckn_scale.errors import CorruptData, InputError
from ckn_scale.storage.run_folder import RunFolder, description_path, model_path
from ckn_scale.storage.run_records import Generation
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, read_file

logger = logging.getLogger(__name__)
FORMAT = 1
_KEY = "ckn_scale"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def save_model(store: Store, name: str, part: ModelPart) -> StoredFile:
    """Write a model under a name made of its content; again, it changes nothing or repairs a damaged file."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a model's name has lower-case letters, digits, '_', '.', '-' only, got {name!r}")
    data = encode_model(name, part)
    sha256 = hashlib.sha256(data).hexdigest()
    file = StoredFile(model_path(name, sha256), sha256, len(data))
    _write(store, file.path, data)
    _write(store, description_path(file.path), _describe(name, file, part))
    return file


def load_model(store: Store, name: str, file: StoredFile) -> ModelPart:
    """A recorded model; CorruptData when its bytes are not the recorded ones."""
    found, part = decode_model(read_file(store, file), store.address(file.path))
    if found != name:
        raise InputError(f"{store.address(file.path)} holds the model {found}, not {name}")
    return part


def load_models(store: Store, models: Mapping[str, StoredFile]) -> dict[str, ModelPart]:
    """Recorded models by name."""
    return {name: load_model(store, name, file) for name, file in models.items()}


def read_generation(run: RunFolder) -> Generation:
    """The models that the run uses; InputError before they are all learned."""
    generation = run.models.latest()
    if generation is None:
        raise InputError(f"{run.url} has no models yet: run `ckn-scale train` first")
    return generation


def find_trained(run: RunFolder, labels: Sequence[str]) -> dict[str, StoredFile]:
    """The models by name that committed shards of training steps have; a later step replaces earlier ones."""
    return {
        name: file
        for label in labels
        for commit in run.commits(label).committed().values()
        for name, file in commit.files.items()
    }


def load_trained(run: RunFolder, labels: Sequence[str], *names: str) -> dict[str, ModelPart]:
    """Models of these names, as the training steps of these labels have committed them."""
    found = find_trained(run, labels)
    return load_models(run.store, {name: found[name] for name in names})


def decode_model(data: bytes, where: str) -> tuple[str, ModelPart]:
    """The name of a model and the model; CorruptData when the bytes are not a whole model file of ours."""
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
    return name, ModelPart(arrays, meta)


def _write(store: Store, path: str, data: bytes) -> None:
    """Other bytes under a name that is the hash of these are damage, so replacing them loses nothing."""
    try:
        store.write_new(path, data)
    except FileExistsError as error:
        logger.warning("%s: it was damaged and is written again", error)
        store.delete(path)
        store.write_new(path, data)


def encode_model(name: str, part: ModelPart) -> bytes:
    """The file of a model: equal models have equal bytes."""
    description = {"format": FORMAT, "name": name, "meta": dict(part.metadata)}
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), allow_nan=False)
    plain = {key: np.ascontiguousarray(value) for key, value in sorted(part.arrays.items())}
    return save_arrays(plain, metadata={_KEY: text})


def _describe(name: str, file: StoredFile, part: ModelPart) -> bytes:
    shapes = {key: {"dtype": str(one.dtype), "shape": list(one.shape)} for key, one in part.arrays.items()}
    body = {"name": name, "sha256": file.sha256, "meta": dict(part.metadata), "arrays": shapes}
    return json.dumps(body, sort_keys=True, indent=1).encode()
