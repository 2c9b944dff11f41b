"""A chain of numbered files in a directory, of which only one can ever be the next.

`link(2)` creates the name of the next number or fails, so it is a compare-and-set without a lock:
a process stopped or killed at any point blocks nobody. The highest number is the present state.
Old numbers are removed, so a process that slept for long could create one of them again; that is
why each entry carries the nonce of the one before it, and an append counts only if it is the
newest entry or if the next one names it.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

ENTRIES_KEPT = 8  # for readers that were about to open one, and for the check by nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One state of the lease. An empty identity: nobody holds it. `records`: job to file name.

    `anchor` is the number of the newest entry that was synced to the disk. A renewal is not: a busy
    disk must not cost the lease, and after a power cut nobody leads anyway.
    """

    number: int = 0
    term: int = 0
    identity: str = ""
    address: str = ""
    host: str = ""
    nonce: str = ""
    previous: str = ""
    anchor: int = 0
    records: dict[str, str] = field(default_factory=dict)


class Chain:
    """The entries in `path`. Several processes may use it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self) -> Entry:
        """The present state. An empty directory is the state number 0."""
        while True:
            numbers = sorted(self._numbers(), reverse=True)
            if not numbers:
                return Entry()
            try:
                return self._newest_whole(numbers)
            except FileNotFoundError:
                continue  # so many newer ones were added meanwhile

    def _newest_whole(self, numbers: list[int]) -> Entry:
        """A power cut leaves entries without content above the last synced one: they are no state,
        but their numbers are taken."""
        for number in numbers:
            content = self._name(number).read_bytes()
            if content.strip(b"\0"):
                return replace(self._parse(number, content), number=numbers[0])
        raise ValueError("no entry has any content")

    def try_append(self, base: Entry, entry: Entry, *, synced: bool = True) -> Entry | None:
        """Make `entry` the state after `base`, or return None because something else is."""
        number = base.number + 1
        entry = replace(
            entry,
            number=number,
            nonce=secrets.token_hex(8),
            previous=base.nonce,
            anchor=number if synced else base.anchor,
        )
        content = {f.name: getattr(entry, f.name) for f in fields(entry)}
        temporary = self.write(f"tmp-{entry.nonce}", json.dumps(content).encode(), synced=synced)
        try:
            os.link(temporary, self._name(entry.number))
        except FileExistsError:
            return None
        finally:
            temporary.unlink(missing_ok=True)
        if synced:
            fsync_directory(self.path)
        return self._confirm(entry)

    def write(self, name: str, content: bytes, *, synced: bool = True) -> Path:
        """A new file. It means nothing until an entry names it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / name, "wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        return self.path / name

    def _confirm(self, entry: Entry) -> Entry | None:
        numbers = self._numbers()
        if max(numbers) > entry.number and not self._is_named_by_next(entry):
            return None
        for number in numbers:
            if number <= entry.number - ENTRIES_KEPT and number != entry.anchor:
                self._name(number).unlink(missing_ok=True)
        return entry

    def _is_named_by_next(self, entry: Entry) -> bool:
        try:
            return self._load(entry.number + 1).previous == entry.nonce
        except FileNotFoundError:
            return False

    def _load(self, number: int) -> Entry:
        return self._parse(number, self._name(number).read_bytes())

    def _parse(self, number: int, content: bytes) -> Entry:
        try:
            return Entry(**json.loads(content))
        except TypeError as error:
            raise ValueError(f"{self._name(number).name} is not ours: {error}") from error

    def _numbers(self) -> list[int]:
        if not self.path.exists():
            return []
        return [int(p.name.removeprefix("entry-")) for p in self.path.glob("entry-*")]

    def _name(self, number: int) -> Path:
        return self.path / f"entry-{number:020}"


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
