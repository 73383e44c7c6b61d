"""Layers of networks in the cache: a study that changes the top only does not learn what is below again."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from ckn_scale.core.ckn_model import Ckn
from ckn_scale.core.model_parts import ModelPart
from ckn_scale.core.specs import CknSpec
from ckn_scale.evaluate.cache import ContentCache, hash_code, make_key


class CachedLayers:
    """A `LayerStore`; `facts` is all that layers depend on besides their own settings.

    `reused_s` is what the layers that were found had taken: tables say what learning takes in all.
    """

    def __init__(self, cache: ContentCache, *facts: Any) -> None:
        self._cache, self._facts = cache, make_key("layers", hash_code(), *facts)
        self._begun, self.reused_s = time.perf_counter(), 0.0

    def load(self, spec: CknSpec, *, complete: bool) -> Ckn | None:
        arrays = self._cache.load(self._name(spec, complete))
        if arrays is None:
            self._begun = time.perf_counter()
            return None
        self.reused_s += float(arrays.pop("seconds")[0])
        metadata = json.loads(arrays.pop("metadata").tobytes())
        return Ckn.from_part(ModelPart(arrays, metadata))

    def save(self, ckn: Ckn, *, complete: bool) -> None:
        arrays, metadata = ckn.to_part()
        about = {
            "metadata": np.frombuffer(json.dumps(metadata).encode(), np.uint8),
            "seconds": np.array([time.perf_counter() - self._begun]),
        }
        self._cache.save(self._name(ckn.spec, complete), {**arrays, **about})

    def _name(self, spec: CknSpec, complete: bool) -> str:
        return make_key(self._facts, spec, complete)
