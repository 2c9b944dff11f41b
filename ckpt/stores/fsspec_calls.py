"""Call a method of a file system that may hang, and say in our words how it failed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any

from ckpt.stores.errors import (
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from ckpt.stores.tries import Deadline

GRACE_S = 5.0  # for a cancelled coroutine to end
FINAL: dict[int, type[StoreError]] = {
    errno.ENOENT: ObjectMissing,
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
    errno.EROFS: StoreDenied,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EEXIST: StoreError,
    errno.EINVAL: StoreError,
    errno.ENOSYS: StoreError,
    errno.ENOTSUP: StoreError,
}


def call_async(
    loop: Any,
    method: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    deadline: Deadline,
) -> Any:
    """Await `method` in the file system's loop; it is cancelled when the deadline passes."""
    left_s = deadline.left_s()
    awaited = asyncio.wait_for(method(*arguments, **named), left_s)
    future = asyncio.run_coroutine_threadsafe(awaited, loop)
    try:
        return future.result(left_s + GRACE_S)
    except (TimeoutError, FutureTimeout) as error:
        future.cancel()
        raise StoreTimeout(f"{method.__name__} gave no answer within {left_s:.3g} s") from error


def call_sync(
    method: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    deadline: Deadline,
) -> Any:
    """Call `method` in a thread of its own; one that hangs is left behind."""
    left_s, future = deadline.left_s(), Future[Any]()

    def run() -> None:
        try:
            future.set_result(method(*arguments, **named))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"ckpt-{method.__name__}").start()
    try:
        return future.result(left_s)
    except FutureTimeout as error:
        if future.done():  # the method itself raised a TimeoutError
            raise StoreTimeout(f"{method.__name__}: {error}") from error
        raise StoreTimeout(f"{method.__name__} gave no answer within {left_s:.3g} s") from error


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what file systems and their clients raise into StoreErrors."""
    try:
        yield
    except (StoreError, TypeError, AssertionError):
        raise
    except NotImplementedError as error:
        raise StoreError(f"{what}: not implemented", errno=errno.ENOSYS) from error
    except FileExistsError as error:
        raise StoreError(f"{what}: exists", errno=errno.EEXIST) from error
    except FileNotFoundError as error:
        raise ObjectMissing(f"{what}: not found: {error}", errno=errno.ENOENT) from error
    except PermissionError as error:
        raise StoreDenied(f"{what}: {error}", errno=errno.EACCES) from error
    except OSError as error:
        kind = FINAL.get(error.errno or 0, StoreUnavailable)
        raise kind(f"{what}: {error}", errno=error.errno) from error
    except Exception as error:  # clients raise errors of their own; another try may work
        raise StoreUnavailable(f"{what}: {type(error).__name__}: {error}") from error
