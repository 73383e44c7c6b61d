"""ckn_scale: instance retrieval over millions of images, learned without labels, on Ray.

    report = ckn_scale.index("photos/", "run/")
    index = ckn_scale.open_index("run/")
    hits = index.search("query.jpg", k=5)
    hits = ckn_scale.Client("http://host:8000", key="…").search("query.jpg", k=5)

Importing the package imports neither torch nor Ray; what is asked of it does, when it is asked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckn_scale.api import index
    from ckn_scale.client import AsyncClient, Client
    from ckn_scale.config import Settings, load_settings
    from ckn_scale.errors import (
        AccessDenied,
        CknScaleError,
        CorruptData,
        ImageRejected,
        InputError,
        MissingDependency,
        NotFound,
        RunFailed,
        RunMismatch,
        ServerBusy,
        ServerError,
        ServerUnreachable,
        SettingsError,
        TransientStoreError,
        UnsupportedStore,
    )
    from ckn_scale.pipeline import IndexReport
    from ckn_scale.search.engine import Index, open_index
    from ckn_scale.search.hits import Hit

__version__ = "0.1.0"
__all__ = [
    "AccessDenied",
    "AsyncClient",
    "CknScaleError",
    "Client",
    "CorruptData",
    "Hit",
    "ImageRejected",
    "Index",
    "IndexReport",
    "InputError",
    "MissingDependency",
    "NotFound",
    "RunFailed",
    "RunMismatch",
    "ServerBusy",
    "ServerError",
    "ServerUnreachable",
    "Settings",
    "SettingsError",
    "TransientStoreError",
    "UnsupportedStore",
    "__version__",
    "index",
    "load_settings",
    "open_index",
]

_HOMES = {
    "index": "ckn_scale.api",
    "load_settings": "ckn_scale.config",
    "Settings": "ckn_scale.config",
    "IndexReport": "ckn_scale.pipeline",
    "Index": "ckn_scale.search.engine",
    "open_index": "ckn_scale.search.engine",
    "Hit": "ckn_scale.search.hits",
    "AsyncClient": "ckn_scale.client",
    "Client": "ckn_scale.client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckn_scale' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "ckn_scale.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
