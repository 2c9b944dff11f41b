"""A collective that was issued: what wait() promises, and how a backend's error becomes ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftcore.process_group.errors import CollectiveFailed, GroupError
from ftcore.process_group.life import Life


class GroupWork(dist.Work):  # type: ignore[misc]
    """A collective that was issued. wait() returns True or raises a GroupError."""

    def __init__(self, life: Life, operation: str, hold_errors: bool) -> None:
        super().__init__()
        self.inner: Any = None
        self._life = life
        self._operation = operation
        self._hold_errors = hold_errors
        self._issued_at = time.monotonic()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, at most for the group's time limit."""
        if self.inner is not None:
            try:
                # An explicit limit would close gloo's connections when it passes, so it is unused.
                self.inner.wait()
                return True
            except RuntimeError as error:
                self.fail(error)
        if self._hold_errors:
            return True
        raise self._life.failure() or AssertionError(f"{self._operation} was never issued")

    def fail(self, error: Exception) -> None:
        """End the group's life with what the backend said."""
        after_s = time.monotonic() - self._issued_at
        what = f"{self._operation} on {self._life.name} failed after {after_s:.3f} s"
        self._life.fail(CollectiveFailed(f"{what}: {reason(error)}", after_s=after_s))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True also for a collective that failed: only wait() and settle() tell success."""
        return self.inner is None or self.inner.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and not self._life.has_failed

    def exception(self) -> GroupError | None:
        return self._life.failure()

    def result(self) -> list[torch.Tensor]:
        return list(self.inner.result()) if self.inner is not None else []

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the same end. Its error is torch's, so prefer wait()."""
        if self.inner is not None:
            return self.inner.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._hold_errors:
            future.set_result([])
        else:
            future.set_exception(self._life.failure() or AssertionError())
        return future


class JoinedWork(GroupWork):
    """Several collectives that are waited for as one."""

    parts: list[GroupWork]

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(part.wait() for part in self.parts)

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self.parts)


class ThenWork(GroupWork):
    """A collective and what this rank does with its result, on the thread that waits."""

    def __init__(self, first: GroupWork, then: Callable[[], None]) -> None:
        super().__init__(first._life, first._operation, first._hold_errors)
        self.inner, self._first, self._then = first.inner, first, then

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._first.wait()
        if not self._life.has_failed:
            self._then()
        return True


def joined(parts: list[GroupWork]) -> GroupWork:
    first = parts[0]
    work = JoinedWork(first._life, first._operation, first._hold_errors)
    work.inner, work.parts = parts[-1].inner, parts
    return work


def reason(error: Exception) -> str:
    """The first line of a torch error, without its source file and its general advice."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = line.split("] ", 1)[-1] if line.startswith("[/") else line
    return line.split(". This is typically", 1)[0].strip()
