"""ckn_scale: instance retrieval over millions of images, learned without labels, on Ray.

    ckn_scale.index("photos/", "run/")
    ckn_scale.open_index("run/").search("query.jpg")

Importing the package imports neither torch nor Ray; the functions do when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "index", "open_index"]

if TYPE_CHECKING:
    from ckn_scale.api import index
    from ckn_scale.search.engine import open_index


def __getattr__(name: str) -> Any:
    if name == "open_index":
        from ckn_scale.search.engine import open_index

        return open_index
    if name == "index":
        from ckn_scale.api import index

        return index
    raise AttributeError(f"module 'ckn_scale' has no attribute {name!r}")
