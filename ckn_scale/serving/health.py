"""Groups that hang: requests of the first seconds wait for such a group, the others go without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 1.0  # who is only busy answers a probe in no time


class HungGroups:
    """Numbers of groups that do not answer a probe either, and are not asked until they do."""

    def __init__(self, probe: Callable[[int], Awaitable[object]]) -> None:
        self._probe = probe
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._hung: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._hung

    def suspect(self, number: int) -> None:
        """A request has waited for this group in vain: it hangs, or has much to do."""
        if number not in self._probing:
            self._probing[number] = asyncio.create_task(self._watch(number))

    async def _watch(self, number: int) -> None:
        try:
            while not await self._answers(number):
                self._hung.add(number)
                await asyncio.sleep(PROBE_INTERVAL_S)
        finally:
            self._hung.discard(number)
            del self._probing[number]

    async def _answers(self, number: int) -> bool:
        try:
            await asyncio.wait_for(self._probe(number), PROBE_TIMEOUT_S)
        except Exception:
            return False
        return True
