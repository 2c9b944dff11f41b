"""One process hears of its end: by a signal, a file, or a metadata server that a test plays."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from ftcore.departure import Departure, Ears
from ftcore.notice import Preemption

HANG_S = 20.0


@contextmanager
def listening(**preemption):
    heard = queue.SimpleQueue()
    ears = Ears(Preemption(poll_s=0.01, **preemption), heard=heard.put)
    try:
        yield heard
    finally:
        ears.close()


def test_sigterm_is_heard_and_the_signal_is_given_back_at_the_end():
    with listening() as heard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=HANG_S).reason == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)  # a second one does no harm
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_heard_while_the_main_thread_runs_no_python():
    """A lock that is never released in time is waited for in C, like a collective."""
    with listening() as heard:
        lock = threading.Lock()
        lock.acquire()
        found = []

        def release():
            found.append(heard.get(timeout=HANG_S).reason)
            lock.release()

        threading.Thread(target=release).start()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        lock.acquire()
        assert found == ["SIGTERM"]


def test_a_handler_of_the_program_is_left_alone():
    def mine(number, frame):
        calls.append(number)

    calls = []
    old = signal.signal(signal.SIGTERM, mine)
    try:
        with listening() as heard:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert calls and heard.empty()
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_file_is_a_notice_and_its_first_line_the_reason(tmp_path):
    file = tmp_path / "going"
    with listening(file=file) as heard:
        other = tmp_path / "written"
        other.write_text("maintenance of rack 7\nmore\n")
        other.rename(file)
        assert heard.get(timeout=HANG_S).reason == "maintenance of rack 7"


class MetadataServer(BaseHTTPRequestHandler):
    """AWS's: a token first; `answers` holds what it says, one after the other."""

    def do_PUT(self):
        self.answer(200, "token-1")

    def do_GET(self):
        if self.headers.get("X-aws-ec2-metadata-token") != "token-1":
            self.answer(401, "")
            return
        answers = self.server.answers
        self.answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        """Quiet."""


@contextmanager
def metadata_server(*answers):
    server = HTTPServer(("127.0.0.1", 0), MetadataServer)
    server.answers = list(answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_metadata_server_is_asked_until_it_says_so():
    going = '{"action": "stop", "time": "8:22"}'
    with (
        metadata_server((404, ""), (401, ""), (500, ""), (200, going)) as url,
        listening(cloud="aws", metadata_url=url) as heard,
    ):
        assert heard.get(timeout=HANG_S).reason == "AWS will stop this instance at 8:22"


def test_a_metadata_server_that_is_not_there_says_nothing(tmp_path):
    file = tmp_path / "going"
    with listening(cloud="gcp", metadata_url="http://127.0.0.1:1", file=file) as heard:
        file.write_text("")
        assert heard.get(timeout=HANG_S).reason == f"{file} exists"


def test_a_notice_before_the_manager_is_there_is_told_as_soon_as_it_is():
    departure = Departure(Preemption(poll_s=0.01), None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + HANG_S
        while departure.notice is None and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        told = []
        departure.attached(told.append)
        assert told == ["SIGTERM"]
    finally:
        departure.close()


def test_who_is_still_there_at_the_end_of_a_sigterm_ends_by_it():
    code = (
        "import os, signal, threading; from ftcore.departure import Ears; "
        "from ftcore.notice import Preemption; "
        "Ears(Preemption(notice_s=0.05), heard=print); "
        "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False)
    assert ended.returncode == 128 + signal.SIGTERM


class Saves:
    def __init__(self, order):
        self.order = order

    def save_within(self, seconds):
        self.order.append("checkpoint" if 0 < seconds <= 30 else f"{seconds} s")


def test_after_leaving_checkpoints_are_saved_and_then_the_program_is_called():
    order = []
    departure = Departure(None, lambda notice: order.append(notice.reason))
    departure.left(Saves(order))
    assert order == []  # an operator's drain is no notice
    departure._heard(_notice())
    departure.left(Saves(order))
    assert order == ["checkpoint", "rack 7"]


def _notice():
    from ftcore.notice import Notice

    return Notice(reason="rack 7", ends_at=time.monotonic() + 30)
