"""What a trainer holds of a save that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.errors import CheckpointError, SaveFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A step became durable at a destination, this long after `save` was called."""

    url: str
    bytes: int
    seconds: float


class SaveHandle:
    """One save. Wait for it, or forget it: the next save never depends on this one."""

    def __init__(self, step: int, urls: tuple[str, ...]) -> None:
        self.step = step
        self.urls = urls
        self.called_at = time.monotonic()
        self.staged_s: float | None = None
        self._changed = threading.Condition()
        self._is_staged = False
        self._durable: dict[str, Durable] = {}
        self._failed: dict[str, CheckpointError] = {}
        self._error: CheckpointError | None = None

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return once the state may change again. From here on the save survives this process.

        Raises StagingTorn, SaveSkipped or another CheckpointError when it was dropped, and
        TimeoutError.
        """
        self._wait(lambda: self._is_staged or self._error is not None, timeout_s, "staged")
        if self._error is not None:
            raise self._error

    def wait_durable(
        self, timeout_s: float | None = None, *, url: str | None = None
    ) -> Mapping[str, Durable]:
        """Return once the step is committed at every destination, or at `url`.

        Raises SaveFailed with the reasons if one failed, and TimeoutError.
        """
        urls = self.urls if url is None else (url,)

        def is_settled() -> bool:
            settled = self._durable.keys() | self._failed.keys()
            return self._error is not None or settled >= set(urls)

        self._wait(is_settled, timeout_s, "durable")
        if self._error is not None:
            raise self._error
        failed = {u: e for u, e in self._failed.items() if u in urls}
        if len(failed) == 1:
            raise next(iter(failed.values()))
        if failed:
            text = "; ".join(f"{u}: {e}" for u, e in failed.items())
            raise SaveFailed(f"step {self.step} failed at {len(failed)} destinations: {text}")
        return dict(self._durable)

    @property
    def is_staged(self) -> bool:
        return self._is_staged

    @property
    def is_durable(self) -> bool:
        """Whether every destination has the step."""
        return self._durable.keys() >= set(self.urls)

    @property
    def durable_at(self) -> tuple[str, ...]:
        """The destinations that have it so far."""
        return tuple(self._durable)

    def _wait(self, condition, timeout_s: float | None, what: str) -> None:  # type: ignore[no-untyped-def]
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise TimeoutError(f"step {self.step} is not {what} after {timeout_s:g} s")

    def set_staged(self) -> None:
        with self._changed:
            self._is_staged = True
            self.staged_s = time.monotonic() - self.called_at
            self._changed.notify_all()

    def set_durable(self, durable: Durable) -> None:
        with self._changed:
            self._durable[durable.url] = durable
            self._changed.notify_all()

    def set_failed(self, url: str, error: CheckpointError) -> None:
        with self._changed:
            self._failed[url] = error
            self._changed.notify_all()

    def fail(self, error: CheckpointError) -> None:
        """Drop the save as a whole."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def is_settled(self) -> bool:
        settled = self._durable.keys() | self._failed.keys()
        return self._error is not None or settled >= set(self.urls)

    @property
    def error(self) -> CheckpointError | None:
        """Why the save was dropped or failed at some destination, if it was."""
        return self._error or next(iter(self._failed.values()), None)
