"""Groups that did not answer in time: one request waits for such a group, the others go without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
PROBE_INTERVAL_S = 0.5


class HungGroups:
    """Numbers of groups that are not asked; each is asked by a probe until it answers."""

    def __init__(self, probe: Callable[[int], Awaitable[object]], timeout_s: float) -> None:
        self._probe = probe
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Task[None]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def add(self, number: int) -> None:
        if number not in self._waiting:
            self._waiting[number] = asyncio.create_task(self._wait_for(number))

    async def _wait_for(self, number: int) -> None:
        try:
            while not await self._answers(number):
                await asyncio.sleep(PROBE_INTERVAL_S)
            logger.info("group %d answers again", number)
        finally:
            del self._waiting[number]

    async def _answers(self, number: int) -> bool:
        try:
            await asyncio.wait_for(self._probe(number), self._timeout_s)
        except Exception:
            return False
        return True
