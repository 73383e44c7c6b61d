"""What lies beside a network's file until that is written: its checkpoint, and the patches it learns from.

Both carry the facts they were made with. Patches are mapped into memory, so that the workers of a host share
them and none of them reads the data again.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from ckn_scale.errors import InputError
from ckn_scale.evaluate.report import write_file

_FACTS, _ARITHMETIC = "ckn_scale_training", "arithmetic"


@dataclass(frozen=True)
class TrainingFiles:
    """The files of one training, named after its result."""

    out: Path
    facts: str

    @property
    def patches(self) -> Path:
        return self.out.with_name(f"{self.out.name}.patches")

    @property
    def checkpoint(self) -> Path:
        return self.out.with_name(f"{self.out.name}.checkpoint")

    def is_done(self) -> bool:
        """Whether the result is there, with these facts."""
        return self._read_facts(self.out) == self.facts

    def has_patches(self) -> bool:
        return self._read_facts(self.patches) == self.facts

    def write_patches(self, groups: Sequence[np.ndarray]) -> None:
        ends = np.cumsum([0, *map(len, groups)])
        self._write(self.patches, {"patches": np.concatenate(groups), "ends": ends})

    def read_checkpoint(self) -> tuple[dict[str, np.ndarray] | None, str | None]:
        """Its arrays and what they were computed with; None where there is none, or a damaged one.

        InputError when it was begun with something else.
        """
        header = _read_header(self.checkpoint)
        try:
            arrays = None if header is None else load_arrays(self.checkpoint.read_bytes())
        except (SafetensorError, OSError):
            arrays = None
        if header is None or arrays is None:
            return None, None
        if header["__metadata__"].get(_FACTS) != self.facts:
            raise InputError(
                f"{self.checkpoint} was begun with another recipe or other data: remove it to start over"
            )
        return arrays, header["__metadata__"][_ARITHMETIC]

    def write_checkpoint(self, arrays: Mapping[str, np.ndarray], arithmetic: str) -> None:
        self._write(self.checkpoint, arrays, {_ARITHMETIC: arithmetic})

    def finish(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the result; what was needed on the way goes."""
        self._write(self.out, arrays)
        self.checkpoint.unlink(missing_ok=True)
        self.patches.unlink(missing_ok=True)

    def _write(
        self, path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
    ) -> None:
        write_file(path, save_arrays(dict(arrays), metadata={_FACTS: self.facts, **(metadata or {})}))

    @staticmethod
    def _read_facts(path: Path) -> str | None:
        header = _read_header(path)
        return None if header is None else header["__metadata__"].get(_FACTS)


def open_patches(path: Path) -> list[np.ndarray]:
    """The groups that `write_patches` wrote, which are read from the file when they are looked at."""
    header = _read_header(path)
    if header is None:
        raise InputError(
            f"host {socket.gethostname()} does not see {path}: all workers must be able to read it"
        )
    patches, ends = (_map_array(path, header, name) for name in ("patches", "ends"))
    return [patches[start:end] for start, end in itertools.pairwise(ends.tolist())]


def _map_array(path: Path, header: Mapping[str, Any], name: str) -> np.ndarray:
    kinds = {"U8": np.uint8, "I64": np.int64}
    begin, end = header[name]["data_offsets"]
    size = path.stat().st_size
    offset = size - max(one["data_offsets"][1] for key, one in header.items() if key != "__metadata__")
    raw = np.memmap(path, np.uint8, "r", offset + begin, end - begin)
    array: np.ndarray = raw.view(kinds[header[name]["dtype"]]).reshape(header[name]["shape"])
    return array


def _read_header(path: Path) -> dict[str, Any] | None:
    """Of a file of safetensors that carries metadata; None for any other."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 1 << 20)))
    except (OSError, ValueError):
        return None
    return header if isinstance(header, dict) and "__metadata__" in header else None
