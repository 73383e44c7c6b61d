"""A source beside the plan: what it has that is new or changed, and what is gone from it.

Both come sorted by URI and are read side by side, so memory does not grow with them. Of several planned
images with one URI the newest counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ckn_scale.storage.image_refs import ImageRef
from ckn_scale.storage.plans import PlannedImage
from ckn_scale.storage.run_records import Segment


@dataclass(frozen=True)
class ChangeCounts:
    """What a source came to beside the plan."""

    added: int = 0
    replaced: int = 0  # other content under a known URI
    deleted: int = 0  # gone from the source; only a sync looks
    unchanged: int = 0
    kept_out: int = 0  # deleted by hand, and still in the source as it was

    def __str__(self) -> str:
        parts = [f"{self.added} added", f"{self.replaced} replaced", f"{self.deleted} deleted"]
        out = f"; {self.kept_out} that were deleted stay out" if self.kept_out else ""
        return f"{', '.join(parts)}, {self.unchanged} as before{out}"


@dataclass
class SourceComparison:
    """`select_new` yields what is new; when it is through, the other fields are known."""

    by_user: Collection[int] = ()  # ids that were deleted by hand: their content stays out
    by_sync: Collection[int] = ()  # ids that were gone from their source: they may come back
    own: Sequence[Segment] = ()  # planned from this source: what is missing of them is gone
    replaced: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    added: int = 0
    unchanged: int = 0
    kept_out: int = 0
    own_living: int = 0  # images of `own` that are not deleted

    @property
    def counts(self) -> ChangeCounts:
        return ChangeCounts(self.added, len(self.replaced), len(self.gone), self.unchanged, self.kept_out)

    def select_new(self, refs: Iterator[ImageRef], planned: Iterable[PlannedImage]) -> Iterator[ImageRef]:
        """Of refs and planned images, both sorted by URI, the refs that the run does not hold as they are."""
        newest = (list(group)[-1] for _, group in groupby(planned, key=lambda image: image.uri))
        known = next(newest, None)
        for ref in refs:
            while known is not None and known.uri < ref.uri:
                self._miss(known)
                known = next(newest, None)
            if known is None or known.uri != ref.uri:
                self.added += 1
                yield ref
                continue
            if self._is_new(known, ref):
                yield ref
            known = next(newest, None)
        while known is not None and self.own:
            self._miss(known)
            known = next(newest, None)

    def _is_new(self, known: PlannedImage, ref: ImageRef) -> bool:
        same = (known.size_bytes, known.etag) == (ref.size_bytes, ref.etag)
        living = self._count_living(known)
        if living and same:
            self.unchanged += 1
        elif living:
            self.replaced.append(known.image_id)
        elif same and known.image_id in self.by_user:
            self.kept_out += 1
            return False
        else:
            self.added += 1
        return not (living and same)

    def _miss(self, known: PlannedImage) -> None:
        if self._count_living(known) and self._is_own(known):
            self.gone.append(known.image_id)

    def _count_living(self, known: PlannedImage) -> bool:
        living = known.image_id not in self.by_user and known.image_id not in self.by_sync
        self.own_living += living and self._is_own(known)
        return living

    def _is_own(self, known: PlannedImage) -> bool:
        place = bisect_right(self.own, known.image_id, key=lambda segment: segment.first_id) - 1
        return place >= 0 and known.image_id < self.own[place].next_id
