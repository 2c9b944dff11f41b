import asyncio
import resource
import signal
import socket
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ftcore.wire.codec import decode_order, encode_hello
from ftcore.wire.messages import Attached, Hello, Member, Quorum, Report, Want, quorum_id_of
from lighthouse.__main__ import main
from lighthouse.core import Record
from lighthouse.errors import JournalBroken, JournalUnwritable
from lighthouse.quorum import Policy
from lighthouse.records import JournalRecords
from lighthouse.server import Lighthouse

QUORUM = Quorum(
    quorum_id=quorum_id_of(1, 4), from_step=9, members=(Member(replica_id="a", incarnation=3),)
)


def write(records, job="job"):
    asyncio.run(records.write(Record(job=job, quorum=QUORUM)))
    records.close()


def test_a_journal_keeps_the_newest_quorum_and_each_start_is_a_new_term(tmp_path):
    write(JournalRecords(tmp_path / "journal"))
    again = JournalRecords(tmp_path / "journal")
    assert (again.term, again.newest()) == (2, {"job": QUORUM})


def test_a_last_line_that_a_crash_cut_off_was_never_announced(tmp_path):
    path = tmp_path / "journal"
    write(JournalRecords(path))
    path.write_text(path.read_text()[:-20])
    assert JournalRecords(path).newest() == {}


def test_damage_in_the_middle_is_refused_with_the_line(tmp_path):
    path = tmp_path / "journal"
    write(JournalRecords(path))
    path.write_text("no journal\n" + path.read_text())
    with pytest.raises(JournalBroken, match="line 1"):
        JournalRecords(path)


def test_a_journal_that_cannot_be_written_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnwritable) as failure:
        JournalRecords(tmp_path / "file" / "journal")
    assert "cannot be written" in str(failure.value) and failure.value.remedy


def test_a_port_in_use_is_one_sentence_and_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(main, ["serve", "--bind", address])
    assert result.exit_code == 1
    assert f"{address} cannot be listened on" in result.stderr
    assert "--bind HOST:PORT" in result.stderr and "Traceback" not in result.output


@contextmanager
def file_size_limit(nbytes):
    """This process may not make a file longer: what a full disk does to a journal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_said_and_what_was_durable_stays(tmp_path):
    path = tmp_path / "journal"
    records = JournalRecords(path)
    asyncio.run(records.write(Record(job="job", quorum=QUORUM)))
    later = replace(QUORUM, quorum_id=quorum_id_of(1, 5))
    with file_size_limit(path.stat().st_size + 10), pytest.raises(JournalUnwritable) as failure:
        asyncio.run(records.write(Record(job="job", quorum=later)))
    assert "free space" in failure.value.remedy
    assert JournalRecords(path).newest() == {"job": QUORUM}


def test_a_lighthouse_whose_disk_is_full_announces_nothing_and_ends(tmp_path):
    async def main():
        records = JournalRecords(tmp_path / "journal")
        lighthouse = Lighthouse(Policy(), records, clock=time.monotonic)
        member = Member(replica_id="a", incarnation=1)
        report = Report(member=member, number=1, want=Want.SEAT)
        with file_size_limit((tmp_path / "journal").stat().st_size + 10):
            group = Told(report)
            serving = asyncio.create_task(lighthouse.serve_stream(group.says(), group.write))
            error = await asyncio.wait_for(lighthouse.failed, 30)
        serving.cancel()
        lighthouse.close()
        return error, [type(decode_order(m)) for m in group.messages]

    error, orders = asyncio.run(main())
    assert isinstance(error, JournalUnwritable) and orders == [Attached]


class Told:
    """Both ends of a stream, without one: it has said hello, and keeps what it is told."""

    def __init__(self, report):
        self._hello, self.messages = encode_hello(Hello(job="job", report=report)), []

    async def says(self):
        yield self._hello
        await asyncio.Future()

    async def write(self, message):
        self.messages.append(message)


def test_a_wall_clock_that_jumps_changes_nothing_that_is_decided(tmp_path, monkeypatch):
    """Only the monotonic clock decides; the wall clock is shown to people."""

    async def main():
        lighthouse = Lighthouse(Policy(), JournalRecords(tmp_path / "j"), clock=time.monotonic)
        member = Member(replica_id="a", incarnation=1)
        report = Report(member=member, number=1, want=Want.SEAT)
        group = Told(report)
        serving = asyncio.create_task(lighthouse.serve_stream(group.says(), group.write))
        async with asyncio.timeout(30):
            while len(group.messages) < 2:
                await asyncio.sleep(0.001)
        job, told = lighthouse.jobs["job"], len(group.messages)
        for jump in (86_400.0, -2 * 86_400.0):
            now = time.time() + jump
            monkeypatch.setattr(time, "time", lambda now=now: now)
            job.heard(replace(report, number=report.number + 1, quorum_id=job.core.last_id))
            job.take(job.core.poll(time.monotonic()))
        serving.cancel()
        lighthouse.close()
        return job.core, len(group.messages) - told

    core, more = asyncio.run(main())
    assert core.standing.replica_ids == ("a",) and more == 0 and set(core.seats) == {"a"}
