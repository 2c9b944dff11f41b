import asyncio
import socket

import pytest
from click.testing import CliRunner

from ftcore.wire.messages import Member, Quorum, quorum_id_of
from lighthouse.__main__ import main
from lighthouse.core import Record
from lighthouse.errors import JournalBroken, JournalUnwritable
from lighthouse.records import JournalRecords

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
