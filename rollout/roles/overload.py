"""How much a server may be asked at once, and what tells one that is slow from one that is gone.

Ranks share a server without knowing of one another, as senders share a network. So each does what these do (additive
increase, multiplicative decrease, as in TCP): it has more in flight while answers come in time, and half as much once
the server refuses or lets a question wait too long.
"""

from __future__ import annotations

import asyncio
from collections import deque

START, LEAST = 32, 8
"""Questions in flight: at first, and however late the answers come."""
SOON, LATE = 0.25, 0.5
"""Parts of the time limit. What is sent until the first answer comes that took longer than SOON can at most double
the wait, so that growing never runs into the limit; a server that takes LATE may slow down by as much again."""


class Limit:
    """How many questions may be in flight at one address.

    An answer within SOON raises it by one; after a cut, by one over the first round (`value` answers), by two over the
    second, and so on. A LATE one takes one away, but not below LEAST: a server may need as long when it is asked nothing
    else. `cut` halves it.
    """

    def __init__(self, most: int, timeout_s: float):
        self._most, self._timeout_s = most, timeout_s
        self._exact = float(min(START, most))
        self._rounds = float("inf")
        self._cut_at = float("-inf")
        self.cuts_in_a_row = 0
        """Since the last answer."""

    @property
    def value(self) -> int:
        return int(self._exact)

    def answered(self, seconds: float, in_flight: int) -> None:
        """`seconds` the answer took since it was asked for, as one of `in_flight`: fewer than allowed show nothing."""
        self.cuts_in_a_row = 0
        if seconds > LATE * self._timeout_s:
            self._exact = max(self._exact - 1, min(self._exact, LEAST))
        elif seconds <= SOON * self._timeout_s and in_flight >= self.value:
            self._rounds += 1 / self._exact
            self._exact = min(self._exact + min(1.0, (1 + self._rounds) / self._exact), self._most)

    def cut(self, sent_at: float, now: float) -> None:
        """After a question, sent at `sent_at`, that found the server overloaded; once for all that were in flight."""
        if sent_at < self._cut_at:
            return
        self._exact = max(1.0, self._exact / 2)
        self._rounds, self._cut_at = 0.0, now
        self.cuts_in_a_row += 1


class Pulse:
    """When a role's servers last gave a usable answer, and last a LATE one."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._answered_at = self._late_at = self._silent_from = float("-inf")
        self._told = False

    def asked_anew(self, now: float) -> None:
        """After a time in which nothing was asked, which is no silence."""
        self._silent_from, self._told = now, False

    def answered(self, sent_at: float, now: float) -> None:
        self._answered_at = self._silent_from = now
        self._told = False
        if now - sent_at > LATE * self._timeout_s:
            self._late_at = now

    def silent_s(self, now: float) -> float:
        """Since the last answer, or since something was asked again."""
        return now - self._silent_from

    def tell(self) -> bool:
        """Whether this silence is still to be told of; only the first time it is asked."""
        told, self._told = self._told, True
        return not told

    def slow_since(self, sent_at: float) -> bool:
        """Whether what was answered since then, if anything, came late. If not, one that still waits is to blame."""
        return self._late_at >= sent_at or self._answered_at <= sent_at


class Places:
    """A semaphore whose size may change. Who waits is let in by order of coming."""

    def __init__(self, size: int):
        self._size, self._taken = size, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # let in and cancelled at the same moment
                self.give_back()
            raise

    def give_back(self) -> None:
        self._taken -= 1
        self._let_in()

    def resize(self, size: int) -> None:
        self._size = size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._taken < self._size:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._taken += 1
                turn.set_result(None)
