"""One query over all shard groups: pin a version, encode, scatter, merge. Knows nothing of Ray.

With verification the groups are asked in rounds, as `search/evidence.py` says: each gives evidence for the
candidates that it owns, and the answer is that of an index opened in one process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ckn_scale.core.calibration import Calibration
from ckn_scale.core.copies import StoredRows
from ckn_scale.core.evidence import HEAD, SHORTLIST, QueryPoints
from ckn_scale.core.ranking import Ranking
from ckn_scale.search.evidence import rank_best
from ckn_scale.search.hit_copies import MOST_COMPARED, NUM_REFERENCES, list_copies
from ckn_scale.search.hits import Hit, IndexedImage
from ckn_scale.serving.answers import MatchAnswer, PhaseClock, Ranked, SearchAnswer, SearchOptions
from ckn_scale.serving.expansion import expand
from ckn_scale.serving.health import HungGroups
from ckn_scale.serving.hit_copies import find_copies, load_rows
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import (
    Box,
    Deleted,
    DrawnImages,
    Encoded,
    EncoderClient,
    GroupClient,
    Judgement,
    Preview,
    ServedVersion,
)
from ckn_scale.serving.refusals import check_can_verify, no_image, require_usable, unavailable
from ckn_scale.serving.request_record import note_group_left_out
from ckn_scale.serving.rounds import Rounds
from ckn_scale.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
MAX_EXAMPLES = 100


class SearchRouter:
    """Asks the encoder and the shard groups; `version` is what new requests are answered from."""

    def __init__(
        self,
        settings: ServeSettings,
        version: ServedVersion,
        encoder: EncoderClient,
        groups: Sequence[GroupClient],
    ) -> None:
        self.settings = settings
        self.version = version
        self._resident = {version.number: version}
        self._encoder = encoder
        self._groups = list(groups)
        self._threads = ThreadPoolExecutor(settings.max_in_flight, "rounds")
        self._hung = HungGroups(self._probe)
        self._examples: tuple[int, DrawnImages] | None = None  # of a version
        self._sample: tuple[int, StoredRows] | None = None  # likewise

    @property
    def resident(self) -> list[int]:
        """The versions that a request may ask for."""
        return sorted(self._resident)

    def pin(self, number: int | None = None) -> ServedVersion:
        """The version that a request is answered from, whatever is switched meanwhile; ApiError 404."""
        if number is None:
            return self.version
        if number not in self._resident:
            known = ", ".join(map(str, self.resident))
            message = f"version {number} is not in memory; a search may ask for: {known}"
            raise ApiError(404, "not_found", message, resident=self.resident)
        return self._resident[number]

    async def search(
        self,
        data: bytes,
        options: SearchOptions,
        box: Box | None = None,
        *,
        version: ServedVersion | None = None,
    ) -> SearchAnswer:
        """The best hits for an image file's bytes, of the groups that answer in time.

        ApiError 400 when the version has no points to verify by, or the filter does not fit; 422 when the
        image cannot be used; 503 when the encoder or every group is missing, or any group with `strict`.
        """
        version = version or self.version  # pinned: a switch meanwhile does not touch this request
        check_can_verify(version, options)
        clock = PhaseClock()
        encoded = await self._encode(version.number, data, box)
        clock.note("encode")
        return await self._answer(version, encoded, options, clock)

    async def similar(
        self, image_id: int, options: SearchOptions, *, version: ServedVersion | None = None
    ) -> SearchAnswer:
        """The same for an indexed image, by what is stored of it; it is not among its hits.

        ApiError 404 when there is no such image.
        """
        version = version or self.version
        check_can_verify(version, options)
        clock = PhaseClock()
        encoded = await self._load_query(version, image_id)
        clock.note("load")
        return await self._answer(version, encoded, options, clock, without=image_id)

    async def match(self, one: bytes | int, other: bytes | int, box: Box | None = None) -> MatchAnswer:
        """Two images beside each other, each a file's bytes or an indexed one's id; errors as of `search`."""
        version, clock = self.version, PhaseClock()
        if version.calibration is None:
            raise ApiError(400, "bad_request", "this index has no points to match images by")
        if isinstance(one, bytes) and isinstance(other, bytes):
            asked = self._encoder.match(version.number, one, other, box)
            found = require_usable(await self._ask_encoder(asked))
        else:
            if isinstance(one, bytes):
                encoded = await self._encode(version.number, one, box)
            else:
                encoded = await self._load_query(version, one)
            clock.note("encode" if isinstance(one, bytes) else "load")
            found = await self._ask_owner(version, int(other), "match", encoded)
            if found is None:
                raise no_image(int(other))
        clock.note("match")
        match, score = found.judge(version.calibration)
        return MatchAnswer(version.number, found, match, score, version.calibration, clock.spent_ms)

    async def _load_query(self, version: ServedVersion, image_id: int) -> Encoded:
        encoded: Encoded | None = await self._ask_owner(version, image_id, "load_query")
        if encoded is None:
            raise no_image(image_id)
        return encoded

    async def _answer(
        self,
        version: ServedVersion,
        encoded: Encoded,
        options: SearchOptions,
        clock: PhaseClock,
        without: int | None = None,
    ) -> SearchAnswer:
        rounds = Rounds(self.ask_group, version, options.wanted, without)
        calibration = version.calibration
        if calibration is None or encoded.points is None or options.verify is False:
            strong = options.keep_strong(await rounds.search_vectors(encoded.vector, options.depth))
            clock.note("search")
            kept, copies = await self._leave_out_copies(rounds, strong, options)
            hits, found, decision = options.choose_page(kept), None, None
        else:
            decision = calibration
            hits, found, copies = await self._verify(rounds, encoded, calibration, options, clock)
        coverage = self._check_coverage(version, rounds.answering, options.strict)
        return SearchAnswer(version.number, hits, coverage, clock.spent_ms, found, decision, copies)

    async def _verify(
        self,
        rounds: Rounds,
        encoded: Encoded,
        calibration: Calibration,
        options: SearchOptions,
        clock: PhaseClock,
    ) -> tuple[list[Hit], bool, dict[int, list[int]] | None]:
        """A page of hits with evidence, whether any is a match, and copies as `_leave_out_copies` says."""
        count, points = max(options.depth, SHORTLIST), encoded.points
        assert points is not None
        if options.depth <= HEAD and not (options.expand or options.group_copies):
            best = await rounds.rank(encoded, count, Judgement(calibration, options.depth), clock)
            if best is not None:
                found = any(hit.verified is not None and hit.verified.match for hit in best)
                return options.choose_page(options.keep_strong(best)), found, None
        candidates = await rounds.find(encoded.vector, count)
        clock.note("search")
        gathered = await rounds.gather(points, *candidates)
        clock.note("evidence")
        if options.expand:
            gathered = await self._expand(rounds, encoded, gathered, options)
            clock.note("expand")
        ranked = rank_best(gathered, calibration, options.depth)
        kept, copies = await self._leave_out_copies(rounds, options.keep_strong(ranked), options)
        if copies is not None:
            clock.note("copies")
        hits = await rounds.describe(options.choose_page(kept))
        clock.note("describe")
        return hits, any(one.verified.match for one in ranked), copies

    async def _leave_out_copies(
        self, rounds: Rounds, ranked: list[Ranked], options: SearchOptions
    ) -> tuple[list[Ranked], dict[int, list[int]] | None]:
        """The best of each group of near-copies, and the others of its group by its id."""
        if not options.group_copies:
            return ranked, None
        references = await self._references(rounds.version)
        ids = [one.image_id for one in ranked[:MOST_COMPARED]]
        groups = await find_copies(rounds, ids, references, self._threads)
        copies = list_copies(ids, groups)
        left_out = {image_id for members in copies.values() for image_id in members}
        return [one for one in ranked if one.image_id not in left_out], copies

    async def _references(self, version: ServedVersion) -> StoredRows:
        """The collection at large, as `core/copies.py` judges copies by it: some images, once a version."""
        if self._sample is None or self._sample[0] != version.number:
            rounds = Rounds(self.ask_group, version)
            drawn = await rounds.draw(NUM_REFERENCES)
            self._sample = version.number, await load_rows(rounds, drawn.image_ids)
        return self._sample[1]

    async def _expand(
        self, rounds: Rounds, encoded: Encoded, first: Ranking, options: SearchOptions
    ) -> Ranking:
        async def widen(hits: Sequence[QueryPoints]) -> list[QueryPoints]:
            return await self._ask_encoder(self._encoder.widen(rounds.version.number, hits))

        discriminative = options.expand == "discriminative"
        return await expand(rounds, encoded, first, widen, self._threads, discriminative=discriminative)

    async def look_up(self, image_id: int) -> IndexedImage:
        """An image of the version; ApiError 404 when there is none, 503 when its group is missing."""
        found: IndexedImage | Deleted | None = await self._ask_owner(self.version, image_id, "look_up")
        if isinstance(found, Deleted):
            raise ApiError(404, "not_found", f"image {image_id} was deleted", state="deleted")
        if found is None:
            raise no_image(image_id)
        return found

    async def thumbnail(self, image_id: int) -> bytes | None:
        """A JPEG; None when the version has no such image; ApiError 503 when its group is missing."""
        jpeg: bytes | None = await self._ask_owner(self.version, image_id, "thumbnail")
        return jpeg

    async def _ask_owner(self, version: ServedVersion, image_id: int, method: str, *arguments: Any) -> Any:
        group = version.group_of(image_id)
        if group is None:
            return None
        try:
            return await self._call_group(group, method, version.number, image_id, *arguments)
        except Exception as error:
            logger.warning("group %d did not answer %s: %r", group, method, error)
            raise unavailable(f"the part of the index that holds image {image_id} is unavailable") from None

    async def draw_examples(self, count: int) -> tuple[int, list[tuple[int, str]]]:
        """The version, and ids and URIs of some of its images; of the groups that answer."""
        version = self.version
        if self._examples is None or self._examples[0] != version.number:
            rounds = Rounds(self.ask_group, version)
            drawn = await rounds.draw(MAX_EXAMPLES)
            if self._check_coverage(version, rounds.answering, strict=False) < 1:
                return version.number, _list_examples(drawn, count)
            self._examples = version.number, drawn
        return version.number, _list_examples(self._examples[1], count)

    async def preview(self, data: bytes) -> Preview:
        """A JPEG of an image file; ApiError 422 when it cannot be used."""
        answer = self._encoder.preview(self.version.number, data)
        return require_usable(await self._ask_encoder(answer))

    async def check_ready(self) -> list[str]:
        """Names of the parts that are not ready for the current version."""
        parts = {"encoder": self._encoder.prepare(self.version.number)}
        for number, group in enumerate(self._groups):
            parts[f"shards-{number}"] = group.prepare(self.version.number)
        ready = await asyncio.gather(*(self._is_ready(answer) for answer in parts.values()))
        return [name for name, is_ready in zip(parts, ready, strict=True) if not is_ready]

    async def switch_when_ready(self, version: ServedVersion) -> bool:
        """Have every part load `version` in the background; use it once all hold it."""
        # Replicas hold two versions: while they load this one, they let go of the one before the current.
        self._resident = {self.version.number: self.version}
        asked = [self._encoder.prepare(version.number)]
        asked += [group.prepare(version.number) for group in self._groups]
        if not all(await asyncio.gather(*(self._is_ready(answer) for answer in asked))):
            return False
        logger.info("serving version %d (was %d)", version.number, self.version.number)
        self._resident[version.number] = self.version = version
        return True

    async def _encode(self, version: int, data: bytes, box: Box | None) -> Encoded:
        return require_usable(await self._ask_encoder(self._encoder.encode(version, data, box)))

    async def _ask_encoder(self, answer: Awaitable[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(answer, self.settings.encode_timeout_s)
        except Exception as error:
            logger.warning("the encoder did not answer: %r", error)
            raise unavailable("the encoder does not answer: try again in a few seconds") from None

    async def ask_group(self, number: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """What one group answers; None when it is dead, slow or has not loaded the version."""
        try:
            return await self._call_group(number, method, *arguments)
        except Exception as error:
            logger.warning("group %d left out of an answer: %r", number, error)
            note_group_left_out(number)
            return None

    async def _call_group(self, number: int, method: str, *arguments: Any) -> Any:
        """Raises whatever is wrong; at once where the group hangs and has no other replica."""
        if number in self._hung:
            raise TimeoutError(f"group {number} does not answer")
        try:
            call = getattr(self._groups[number], method)(*arguments)
            return await asyncio.wait_for(call, self.settings.shard_timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            if self.settings.shard_replicas == 1:
                self._hung.suspect(number)
            raise

    def _probe(self, number: int) -> Awaitable[bool]:
        return self._groups[number].prepare(self.version.number)

    def _check_coverage(self, version: ServedVersion, answering: Collection[int], strict: bool) -> float:
        answered = [rows for group, rows in enumerate(version.group_rows) if not rows or group in answering]
        coverage = sum(answered) / version.rows if version.rows else 1.0
        if not answered or (version.rows and coverage == 0):
            raise unavailable("no part of the index answers: try again in a few seconds")
        if strict and coverage < 1:
            raise unavailable(f"only {coverage:.1%} of the index answers, and the request asked for all")
        return coverage

    async def _is_ready(self, answer: Awaitable[bool]) -> bool:
        try:
            return await asyncio.wait_for(answer, self.settings.shard_timeout_s)
        except Exception as error:
            logger.warning("a part is not ready: %r", error)
            return False


def _list_examples(drawn: DrawnImages, count: int) -> list[tuple[int, str]]:
    return list(zip(drawn.image_ids.tolist(), drawn.uris, strict=True))[:count]
