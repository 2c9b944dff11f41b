"""What a suspect is, and the facts about one rank that every accusation needs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flightrec.lanes import Lane, Lanes
from flightrec.model import Kind, Records, Site
from flightrec.tokens import describe

LIBRARY = re.compile(
    r"/torch/|/typing_extensions\.py$|/contextlib\.py$|^<frozen "
    r"|/lib/python3\.\d+/(?!(?:site|dist)-packages/)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One rank, one fault. `explains` counts the ranks whose waiting leads to it."""

    rank: int
    kind: Kind
    group: int
    seq: int | None = None
    call: int = -1  # index into Records.calls; -1: not known
    site: int = -1
    confidence: float = 0.0
    because: tuple[str, ...] = ()
    explains: int = 0
    is_hanging: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """The records with their lanes, and sentences about them."""

    records: Records
    lanes: Lanes

    def lane(self, group: int, rank: int) -> Lane | None:
        return self.lanes.of[group].get(rank)

    def issued(self, group: int, rank: int) -> int:
        lane = self.lane(group, rank)
        return lane.issued if lane else 0

    def first_shown(self, group: int) -> int:
        """The lowest sequence number that any dump shows of the group; 0 when none does. Dumps of
        active calls alone begin with the open ones."""
        lanes = self.lanes.of[group].values()
        return min((lane.seq[0] for lane in lanes if lane.seq), default=0)

    def call_at(self, group: int, seq: int, *, of: int | None = None) -> tuple[int, int]:
        """Call and site at `seq`, as `of` made it, or the first rank that shows it; -1: nobody."""
        ranks = [of] if of is not None else sorted(self.lanes.of[group])
        for rank in ranks:
            lane = self.lane(group, rank)
            at = lane.position(seq) if lane else None
            if lane and at is not None:
                return lane.call[at], lane.site[at]
        return -1, -1

    def last_of(self, rank: int) -> tuple[int, int, int, int] | None:
        """Group, sequence number, call and site of the last thing a rank recorded."""
        record = self.records.ranks.get(rank)
        if record is None or record.columns is None or not len(record.columns):
            return None
        c = record.columns
        return c.group[-1], c.seq[-1], c.call[-1], c.site[-1]

    def op(self, call: int) -> str:
        return self.records.calls[call].op if call >= 0 else ""

    def told(self, call: int) -> str:
        return describe(self.records.calls[call]) if call >= 0 else "a call"

    def site(self, index: int) -> Site:
        return self.records.sites[index] if index >= 0 else ()

    def where(self, index: int) -> str:
        return where(self.site(index))

    def name(self, group: int) -> str:
        """ "tp [2, 3]", "default_pg": ranks are told unless they are everybody."""
        known = self.records.groups[group]
        if known.ranks == self.records.expected_ranks:
            return str(known)
        return f"{known} {shown(known.ranks)}"


def where(site: Site) -> str:
    """The innermost frame of the user's own code, as "file:line in name"."""
    for frame in site:
        if not LIBRARY.search(frame.filename):
            return str(frame)
    return str(site[0]) if site else ""


def shown(ranks: tuple[int, ...] | list[int]) -> str:
    """ "[0, 1, 2, 3]", and "[0-1023]" or "[0, 4, … 1020]" when there are many."""
    if len(ranks) <= 8:
        return "[" + ", ".join(map(str, ranks)) + "]"
    if tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"
