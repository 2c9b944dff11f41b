"""Try a request again until it works, its tries are used up, or the deadline has passed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt.stores.errors import StoreError, StoreTimeout
from ftcore.base.retry import backoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock after which nobody waits any more."""

    at_s: float
    what: str = "the operation"

    @classmethod
    def after(cls, seconds: float, what: str = "the operation") -> Deadline:
        return cls(time.monotonic() + seconds, what)

    def left_s(self) -> float:
        """Seconds left; raises StoreTimeout when there are none."""
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise StoreTimeout(f"the deadline of {self.what} has passed")
        return left_s

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at_s, time.monotonic() + seconds), self.what)


def with_tries(
    call: Callable[[Deadline], T],
    *,
    what: str,
    tries_max: int,
    deadline: Deadline,
    request_timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The answer of `call(deadline of this try)`; a retryable StoreError means: try again.

    The wait between tries is exponential with jitter, and at least `retry_after_s` when the
    error's facts hold it (a throttling store says how long). Raises the last error with the number
    of tries in it.
    """
    waits = backoff(random.Random(), first_s=0.1, max_s=5.0)
    for number in range(1, tries_max + 1):
        try:
            return call(deadline.within(request_timeout_s))
        except StoreError as error:
            wait_s = max(next(waits), _asked_wait_s(error))
            out_of_time = time.monotonic() + wait_s >= deadline.at_s
            if not error.retryable or number == tries_max or out_of_time:
                raise _with_tries(error, what=what, tries=number) from error
            sleep(wait_s)
    raise AssertionError("tries_max must be at least 1")


def _asked_wait_s(error: StoreError) -> float:
    asked = error.facts.get("retry_after_s", 0.0)
    return float(asked) if isinstance(asked, int | float) else 0.0


def _with_tries(error: StoreError, *, what: str, tries: int) -> StoreError:
    """The same error, saying what was tried and how often."""
    times = "" if tries == 1 else f" (after {tries} tries)"
    facts = {**error.facts, "operation": what, "tries": tries}
    return type(error)(f"{what}: {error}{times}", remedy=error.remedy, **facts)
