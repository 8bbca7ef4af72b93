"""Circuit breakers of workers, apart pairs of workers, and the budget of retries. Plain state; time is given."""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Opens after failures in a row; after a pause one trial at a time decides whether it closes.

    Only 5xx answers, timeouts and connection errors are failures; refusals (429, 503) and client errors are not.

    Args:
        failures: failures in a row that open it.
        open_s: pause before the first trial; doubles with every failed trial.
        max_open_s: longest pause.
    """

    def __init__(self, failures: int, open_s: float, max_open_s: float) -> None:
        self._failures = failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._open_s = open_s
        self._in_a_row = 0
        self._open_until_s = 0.0
        self._open = False
        self._trial = False
        self.opened = 0
        """How often it has opened."""

    def state(self, now_s: float) -> BreakerState:
        """Its state now."""
        if not self._open:
            return "closed"
        return "open" if now_s < self._open_until_s else "half_open"

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent: always when closed, one at a time when half open."""
        return not self._open or (now_s >= self._open_until_s and not self._trial)

    def sent(self, now_s: float) -> bool:
        """A request goes out; gives whether it is the trial of a half-open breaker."""
        if self._open and now_s >= self._open_until_s and not self._trial:
            self._trial = True
            return True
        return False

    def success(self) -> None:
        """An answer of any kind that is no failure."""
        self._in_a_row = 0
        self._open = self._trial = False
        self._open_s = self._first_open_s

    def failure(self, now_s: float, trial: bool = False) -> None:
        """A failed request; `trial` if it was the trial.

        A failure of a request sent before the breaker opened says nothing new and does not lengthen the pause.
        """
        self._in_a_row += 1
        if trial:
            self._trial = False
            self._open_s = min(2.0 * self._open_s, self._max_open_s)
            self._open_until_s = now_s + self._open_s
        elif not self._open and self._in_a_row >= self._failures:
            self._open = True
            self.opened += 1
            self._open_until_s = now_s + self._open_s

    def abandoned(self, trial: bool) -> None:
        """A request ended without a verdict (the client left): the next one may be the trial."""
        if trial:
            self._trial = False


class SharedBlame:
    """Which of two workers is at fault where one answer stands for both.

    It is the one that lately failed with more partners: a dead prefill worker fails with every decode worker, a dead
    decode worker behind every prefill worker. While that does not tell, it is the prefill worker.

    Args:
        window_s: how long a failure is remembered.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._failed_s: dict[str, dict[str, float]] = {}

    def decode_at_fault(self, prefill: str, decode: str, now_s: float) -> bool:
        """A request over these two failed; gives whether the decode worker is to blame."""
        for one, other in ((prefill, decode), (decode, prefill)):
            self._failed_s.setdefault(one, {})[other] = now_s
        return self._partners(decode, now_s) > self._partners(prefill, now_s)

    def worked(self, prefill: str, decode: str) -> None:
        """A request over these two was answered: neither is at fault."""
        self.forget(prefill)
        self.forget(decode)

    def forget(self, name: str) -> None:
        """Forget the failures of a worker."""
        self._failed_s.pop(name, None)

    def _partners(self, name: str, now_s: float) -> int:
        """Other workers that it failed with lately."""
        recent = {n: s for n, s in self._failed_s[name].items() if now_s - s <= self._window_s}
        self._failed_s[name] = recent
        return len(recent)


class PairTable:
    """Pairs of a prefill and a decode worker between which transfers keep failing are kept apart for a while."""

    def __init__(self, failures: int, open_s: float) -> None:
        self._failures = failures
        self._open_s = open_s
        self._in_a_row: dict[tuple[str, str], int] = {}
        self._until_s: dict[tuple[str, str], float] = {}

    def failed(self, prefill: str, decode: str, now_s: float) -> bool:
        """A transfer failed; gives whether the pair is apart from now on."""
        pair = (prefill, decode)
        count = self._in_a_row.get(pair, 0) + 1
        self._in_a_row[pair] = count
        if count < self._failures:
            return False
        self._until_s[pair] = now_s + self._open_s
        return True

    def worked(self, prefill: str, decode: str) -> None:
        """A transfer arrived."""
        if self._in_a_row:
            self._in_a_row.pop((prefill, decode), None)
            self._until_s.pop((prefill, decode), None)

    def apart(self, prefill: str, decode: str, now_s: float) -> bool:
        """Whether this pair should not be chosen."""
        return bool(self._until_s) and self._until_s.get((prefill, decode), 0.0) > now_s

    def forget(self, worker: str) -> None:
        """A worker left or started anew: what was learned about it no longer holds."""
        for table in (self._in_a_row, self._until_s):
            for pair in [pair for pair in table if worker in pair]:
                del table[pair]

    def as_json(self, now_s: float) -> list[dict[str, str | float]]:
        """Pairs that are apart."""
        return [
            {"prefill": p, "decode": d, "left_s": round(until_s - now_s, 3)}
            for (p, d), until_s in self._until_s.items()
            if until_s > now_s
        ]


class RetryBudget:
    """Retries are at most a share of requests, with a few saved up for a bad moment."""

    def __init__(self, share: float, reserve: float) -> None:
        self._share = share
        self._reserve = reserve
        self.left = reserve

    def request(self) -> None:
        """A request came."""
        self.left = min(self.left + self._share, self._reserve)

    def take(self) -> bool:
        """Ask for one retry."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True
