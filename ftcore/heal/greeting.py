"""Ask the sources for their manifest, one after the other, until one of them gives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError

from ftcore.base.errors import FtError
from ftcore.heal import wire
from ftcore.heal.errors import HealFailed, OfferRefused, SourceLost
from ftcore.heal.manifest import Manifest
from ftcore.heal.receiver import fetch_manifest
from ftcore.heal.server import Offer


class Greeting:
    """Runs on a thread of its own, so that a source that says nothing holds up nobody."""

    def __init__(self, offers: Sequence[Offer], *, reader: str, silent_s: float) -> None:
        self._offers, self._reader, self._silent_s = offers, reader, silent_s
        self._lock = threading.Lock()
        self._is_over = False
        self._socket: socket.socket | None = None

    def run(
        self, look: Callable[[], object], *, every_s: float
    ) -> tuple[Offer, Manifest, socket.socket]:
        """The first source that answered, its manifest, and the connection that it came by. `look`
        is called meanwhile, on the calling thread; what it raises ends the greeting.

        Raises OfferRefused when all refuse, and HealFailed when none gives its manifest.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="ft-greet") as pool:
            answer = pool.submit(self._ask_each)
            try:
                while True:
                    try:
                        return answer.result(timeout=every_s)
                    except TimeoutError:
                        look()
            except BaseException:
                self._end()
                raise

    def _ask_each(self) -> tuple[Offer, Manifest, socket.socket]:
        errors: list[FtError] = []
        for offer in self._offers:
            try:
                manifest, connection = fetch_manifest(
                    offer, self._reader, self._silent_s, opened=self._opened
                )
                return offer, manifest, connection
            except FtError as error:
                errors.append(error)
        if all(isinstance(error, OfferRefused) for error in errors):
            raise errors[0]
        pairs = zip(self._offers, errors, strict=True)
        what = "; ".join(f"{offer.address}: {error}" for offer, error in pairs)
        raise HealFailed(f"no source gave its manifest ({what})") from errors[0]

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_over:
                raise SourceLost("the heal is over")
            self._socket = connection

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._socket is not None:
                wire.shut(self._socket)
