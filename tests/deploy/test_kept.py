"""Interruptions are kept in the journal, so many and no more, and come back after a restart."""

import asyncio
import json

from ftcore.wire.messages import Member, Quorum
from lighthouse.core import Record
from lighthouse.records import NOTES_MAX, JournalRecords


def quorum(number):
    members = (Member(replica_id="a", incarnation=1),)
    return Quorum(quorum_id=number, from_step=0, members=members)


def test_a_restarted_lighthouse_still_knows_them(tmp_path):
    first = JournalRecords(tmp_path / "journal")
    first.note("llm", {"number": 1, "cause": "lost"})
    asyncio.run(first.write(Record(job="llm", quorum=quorum(7))))
    first.close()
    second = JournalRecords(tmp_path / "journal")
    assert second.noted("llm") == [{"number": 1, "cause": "lost"}]
    assert second.noted("other") == [] and second.newest()["llm"].quorum_id == 7


def test_old_ones_are_dropped(tmp_path):
    first = JournalRecords(tmp_path / "journal")
    for number in range(NOTES_MAX + 30):
        first.note("llm", {"number": number})
    first.close()
    second = JournalRecords(tmp_path / "journal")
    assert [n["number"] for n in second.noted("llm")] == list(range(30, NOTES_MAX + 30))
    assert len((tmp_path / "journal").read_text().splitlines()) == NOTES_MAX + 1


def test_one_that_a_crash_cut_off_costs_nothing_else(tmp_path):
    first = JournalRecords(tmp_path / "journal")
    asyncio.run(first.write(Record(job="llm", quorum=quorum(7))))
    first.note("llm", {"number": 1})
    first.close()
    path = tmp_path / "journal"
    path.write_text(path.read_text()[:-9])
    second = JournalRecords(path)
    assert second.noted("llm") == [] and second.newest()["llm"].quorum_id == 7


def test_a_journal_from_before_can_still_be_read(tmp_path):
    path = tmp_path / "journal"
    path.write_text(json.dumps({"term": 4}) + "\n")
    assert JournalRecords(path).term == 5
