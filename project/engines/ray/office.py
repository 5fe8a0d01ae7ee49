"""The actor that the driver and all workers of a run talk to: what the ranks print, how they end, and who is to stop."""

import asyncio
import signal
import time
from typing import Any

from project.engines.ray.ledger import Ledger

_TURN = 0.5  # seconds from one look at the clock to the next


class Office:
    """Holds the ledger, beside the driver. Ray calls its methods by turns, in one thread."""

    def __init__(self, max_failures: int) -> None:
        self._ledger = Ledger(max_failures)
        self._change = asyncio.Condition()
        self._coming: dict[str, dict[int, tuple[str, str]]] = {}
        self._words: dict[str, list[int]] = {}
        self._lines: list[tuple[int, bytes]] = []

    async def _wait(self, true: Any) -> None:
        """Until something is true, of which a change or the clock may be the reason."""
        async with self._change:
            while not true():
                try:
                    await asyncio.wait_for(self._change.wait(), _TURN)
                except asyncio.TimeoutError:
                    continue

    async def _changed(self) -> None:
        async with self._change:
            self._change.notify_all()

    # The workers' ---------------------------------------------------------------------------------------------------

    async def comes(self, name: str, rank: int, world: int, host: str, node: str, newest: str) -> list[str]:
        """Waits for all workers of a start: the nodes of all of them, by rank; or none, where nothing is to start."""
        coming = self._coming.setdefault(name, {})
        coming[rank] = host, node
        if len(coming) == world:
            self._words[name] = []
            hosts = [coming[one][0] for one in range(world)]
            if not self._ledger.begins(name, hosts, newest):
                self._coming[name] = {}
        await self._changed()
        await self._wait(lambda: name in self._words)
        return [node for _, (_, node) in sorted(self._coming[name].items())]

    async def word(self, name: str, heard: int) -> int | None:
        """The next signal for the children of a start; None once it is over."""
        await self._wait(lambda: not self._goes_on(name) or len(self._words[name]) > heard)
        return self._words[name][heard] if len(self._words[name]) > heard else None

    async def ends(self, name: str, rank: int, code: int) -> bool:
        """Whether all workers are to be started again; waits until that is known."""
        start, ledger = self._ledger.start, self._ledger
        if start is None or start.name != name:
            return False
        ledger.ends(rank, code)
        await self._changed()
        await self._wait(lambda: start.again is not None or ledger.decides)
        again = ledger.decide() if ledger.start is start else False
        if not again and not start.whole:
            self._words[name].append(signal.SIGTERM)
        await self._changed()
        return again

    async def preempted(self, name: str, ranks: list[int]) -> None:
        """The hosts of these ranks are taken away: all stop, with a checkpoint."""
        start = self._ledger.start
        if start is not None and start.name == name and not start.preempted:
            start.preempted = ", ".join(sorted({start.hosts[rank] for rank in ranks}))
            self._words[name].append(signal.SIGTERM)
            await self._changed()

    def says(self, stream: int, text: bytes) -> None:
        """What a child has printed."""
        self._lines.append((stream, text))

    # Ray's controller's ---------------------------------------------------------------------------------------------

    async def resizes(self, seconds: float) -> None:
        """Ray will end the workers, to start another number of them: first, all children stop with a checkpoint."""
        start = self._ledger.start
        if start is None or start.again is not None or start.codes:
            return
        start.resized = True
        self._words[start.name].append(signal.SIGTERM)
        await self._changed()
        deadline = asyncio.get_running_loop().time() + seconds
        await self._wait(lambda: start.whole or asyncio.get_running_loop().time() > deadline)

    async def lost(self, why: dict[int, str]) -> None:
        """These workers have failed, or their hosts: Ray ends the others. Whoever has not said how it ended will not."""
        start = self._ledger.start
        if start is not None and start.again is None:
            start.gone, start.failed_at = True, start.failed_at or time.monotonic()
            start.lost = why

    # The driver's ---------------------------------------------------------------------------------------------------

    async def hears(self) -> tuple[list[tuple[int, bytes]], list[tuple[str, str]], bool]:
        """What was printed, what there is to say, and whether workers are at it. Returns at once if there is something."""
        ledger = self._ledger
        deadline = asyncio.get_running_loop().time() + _TURN
        await self._wait(lambda: self._lines or ledger.said or ledger.decides or asyncio.get_running_loop().time() > deadline)
        if ledger.decides:  # where the workers that asked are gone, too
            ledger.decide()
            await self._changed()
        lines, self._lines = self._lines, []
        said, ledger.said = ledger.said, []
        return lines, said, ledger.start is not None and self._goes_on(ledger.start.name)

    async def stop(self, number: int) -> bool:
        """The user wants an end: whether there are children to hear that."""
        start, self._ledger.asked = self._ledger.start, number
        if start is None or not self._goes_on(start.name):
            return False
        self._words[start.name].append(number)
        await self._changed()
        return True

    def code(self) -> int | None:
        """The exit code, if it is known."""
        return self._ledger.code

    def _goes_on(self, name: str) -> bool:
        start = self._ledger.start
        return start is not None and start.name == name and start.again is None
