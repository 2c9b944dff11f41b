import random
import socket
import threading

import pytest

from ftcore.base.errors import FtError
from ftcore.heal import Offer, heal
from ftcore.heal.wire import receive_frame, send_frame
from tests.heal.states import bits, state


class Hostile:
    """Admits a reader and then answers with whatever it was given."""

    def __init__(self, answers):
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.offer = Offer(
            address=f"127.0.0.1:{port}", token="t", step=1, quorum_id=1, layout_hash=0
        )
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    receive_frame(connection)
                    send_frame(connection, {"ok": True})
                    receive_frame(connection)
                    connection.sendall(self._answers)
                except (OSError, FtError):
                    pass


def frame(text):
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize(
    "answers",
    [
        b"",
        b"\xff\xff\xff\xff",
        frame(b"[]"),
        frame(b"{"),
        frame(b"[" * 60_000),
        frame(b'{"blocks":[1,2]}'),
        frame(b'{"blocks":[-1,0,0,0]}'),
        frame(b'{"blocks":[1e9,0,0,0]}'),
        frame(b'{"blocks":[99999999999999,0,0,0]}'),
        frame(b'{"blocks":[60000000000,0,0,0]}') + b"x" * 1000,
        frame(b'{"blocks":[2,2,2,0]}') + b"{}{}{}" + bytes(8),
        frame(b'{"refused":"no"}'),
    ],
)
def test_a_hostile_manifest_is_a_clear_error_and_changes_nothing(answers):
    joiner = state(1)
    before = bits(joiner)
    with Hostile(answers) as hostile, pytest.raises(FtError) as failure:
        heal([hostile.offer], into=joiner, silent_s=0.5)
    assert failure.value.remedy
    assert bits(joiner) == before


@pytest.mark.parametrize("seed", range(40))
def test_random_answers_are_a_clear_error(seed):
    rng = random.Random(seed)
    with Hostile(rng.randbytes(rng.randint(1, 300))) as hostile, pytest.raises(FtError):
        heal([hostile.offer], into={"step": 0}, silent_s=0.2)
