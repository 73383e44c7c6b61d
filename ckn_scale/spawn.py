"""Processes started afresh that know nothing of the caller's script.

Python's own `spawn` runs the caller's main module again in every child, so that a script which calls
`ckn_scale.index` outside of `if __name__ == "__main__"` would start itself over and over. Our children
import what they need from this package.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

_swapping = threading.Lock()


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _empty_main():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def _empty_main() -> Iterator[None]:
    with _swapping:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


SPAWN = _Context()
