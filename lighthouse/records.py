"""Keep each job's newest quorum across restarts: what must be durable before it is announced."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from ftcore.wire.codec import quorum_from_pb, quorum_to_pb
from ftcore.wire.errors import BadMessage
from ftcore.wire.ftcore_pb2 import Quorum as QuorumPb
from ftcore.wire.messages import Quorum
from lighthouse.core import Record
from lighthouse.errors import JournalBroken, JournalUnwritable
from lighthouse.status import JsonDict

NOTES_MAX = 200  # interruptions of one job


class Records(Protocol):
    """Where quorums are kept. `term` is greater than in every earlier life of this lighthouse."""

    @property
    def term(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether a job that is not recorded certainly never had a quorum."""

    def newest(self) -> Mapping[str, Quorum]: ...

    def may_speak(self) -> bool:
        """Whether this lighthouse leads at this moment: a deposed one says nothing more."""

    async def write(self, record: Record) -> None:
        """Return once the record is durable; raise Deposed when another lighthouse leads."""

    def note(self, job: str, interruption: JsonDict) -> None:
        """Keep an interruption for people. It may be lost in a crash, and old ones are dropped."""

    def noted(self, job: str) -> list[JsonDict]:
        """The interruptions kept from earlier lives of this lighthouse, oldest first."""


class MemoryRecords:
    """Nothing is kept: a restarted lighthouse learns from the groups alone."""

    is_complete = False

    def __init__(self, *, term: int | None = None) -> None:
        # No memory of earlier terms, so the clock has to do: minutes since 2020.
        self.term = int(time.time() - 1_577_836_800) // 60 if term is None else term
        self._newest: dict[str, Quorum] = {}

    def newest(self) -> Mapping[str, Quorum]:
        return self._newest

    def may_speak(self) -> bool:
        return True

    async def write(self, record: Record) -> None:
        self._newest[record.job] = record.quorum

    def note(self, job: str, interruption: JsonDict) -> None:
        """Not kept: nothing is."""

    def noted(self, job: str) -> list[JsonDict]:
        return []


class JournalRecords:
    """An append-only file of JSON lines, synced at each line, rewritten short at each start."""

    is_complete = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.term = 0
        self._newest: dict[str, Quorum] = {}
        self._notes: dict[str, deque[JsonDict]] = {}
        self._load()
        self.term += 1
        self._file = self._rewrite()

    def newest(self) -> Mapping[str, Quorum]:
        return self._newest

    def may_speak(self) -> bool:
        return True

    async def write(self, record: Record) -> None:
        """Blocks the event loop for one fsync, a few milliseconds: quorum changes are rare."""
        self._newest[record.job] = record.quorum
        try:
            self._file.write(_quorum_line(record.job, record.quorum))
            _sync(self._file)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def note(self, job: str, interruption: JsonDict) -> None:
        try:
            self._file.write(_note_line(job, interruption))
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def noted(self, job: str) -> list[JsonDict]:
        return list(self._notes.get(job, ()))

    def close(self) -> None:
        self._file.close()

    def _load(self) -> None:
        try:
            lines = self._path.read_text().split("\n")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise _unwritable(self._path, error) from error
        for number, line in enumerate(lines, 1):
            try:
                self._take(json.loads(line) if line else {})
            except (ValueError, KeyError, TypeError, AttributeError, BadMessage) as error:
                if number >= len(lines):
                    return  # the last line was cut off by a crash: it was never announced
                raise JournalBroken(
                    f"line {number} of {self._path} cannot be read: {error}", line=number
                ) from error

    def _take(self, line: dict[str, object]) -> None:
        if "term" in line:
            self.term = max(self.term, int(str(line["term"])))
        if "interruption" in line:
            notes = self._notes.setdefault(str(line["of"]), deque(maxlen=NOTES_MAX))
            notes.append(dict(line["interruption"]))  # type: ignore[call-overload]
        if "job" in line:
            quorum = quorum_from_pb(QuorumPb.FromString(bytes.fromhex(str(line["quorum"]))))
            self._newest[str(line["job"])] = quorum

    def _rewrite(self) -> IO[str]:
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                file.write(json.dumps({"term": self.term}) + "\n")
                for job, quorum in self._newest.items():
                    file.write(_quorum_line(job, quorum))
                for job, notes in self._notes.items():
                    file.writelines(_note_line(job, note) for note in notes)
                _sync(file)
            temporary.replace(self._path)
            return self._path.open("a")
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _quorum_line(job: str, quorum: Quorum) -> str:
    """The quorum as protobuf in hex; step and members beside it for people with grep."""
    data = quorum_to_pb(quorum).SerializeToString().hex()
    facts = {"from_step": quorum.from_step, "members": list(quorum.replica_ids)}
    return json.dumps({"job": job, **facts, "quorum": data}) + "\n"


def _note_line(job: str, interruption: JsonDict) -> str:
    return json.dumps({"of": job, "interruption": interruption}) + "\n"


def _sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unwritable(path: Path, error: Exception) -> JournalUnwritable:
    reason = getattr(error, "strerror", None) or error
    return JournalUnwritable(f"the journal {path} cannot be written: {reason}", path=str(path))
