"""Look at the ranks of a quorum: fetch their flight records, take stacks, say who holds others up.

A process of its own, `python -m ftcore.daemon.look ORDER_JSON`, so that a manager neither waits for
it nor falls with it. Prints a JSON object: the analyzer's report, and where each rank stands.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from flightrec.annotate import annotated
from flightrec.cli import Case
from flightrec.errors import NoDumps
from flightrec.suspects import where
from flightrec.watch import look_into
from ftcore.base.errors import FtError
from ftcore.flight import fetch_record
from ftcore.names import CREW, crew_name

FETCH_TIMEOUT_S = 10.0
FETCHES_MAX = 32  # at a time
RAS = ("localhost", 28028)  # where NCCL's RAS service listens by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to look at. Rank `position * ranks + r` is rank r of the group at `position`."""

    job: str
    quorum_id: int
    ranks: int  # of each replica group
    addresses: Mapping[int, str]  # by global rank; not always all of the quorum
    names: Mapping[int, str]  # by global rank, for people
    pids: Mapping[int, int]  # of the ranks on this machine, as far as they are known
    folder: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        plain = json.loads(text)
        for key in ("addresses", "names", "pids"):
            plain[key] = {int(rank): value for rank, value in plain[key].items()}
        return Order(**plain)


def look(order: Order) -> dict[str, object]:
    """Fetch, analyze, and leave everything in the order's folder, with a page for people."""
    folder = Path(order.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    live = {CREW: _crews(order)}
    with ThreadPoolExecutor(max_workers=FETCHES_MAX) as pool:
        fetched = dict(
            zip(order.addresses, pool.map(_fetch, order.addresses.values()), strict=True)
        )
    for rank, (dump, stacks) in fetched.items():
        if dump:
            data = annotated(dump, rank=rank, host=order.names[rank], live_groups=live)
            (folder / f"rank_{rank}").write_bytes(data)
        if stacks:
            (folder / f"rank_{rank}.stack").write_bytes(stacks)
    has_nccl = any(b"nccl:" in dump for dump, _ in fetched.values())
    names = ", ".join(f"{rank} is {order.names[rank]}" for rank in sorted(order.addresses))
    case = look_into(
        folder, pids=order.pids, ras=RAS if has_nccl else None, notes=[f"rank {names}"]
    )
    answer = {"report": case.report.to_json(), "stands": _stands(case)}
    (folder / "verdict.json").write_text(json.dumps(answer, indent=1))
    _write_page(folder / "hang.html", case)
    return answer


def _crews(order: Order) -> dict[str, list[int]]:
    """The groups across replica groups, with those members that are looked at."""
    crews: dict[str, list[int]] = {}
    for rank in sorted(order.addresses):
        name = crew_name(order.job, order.quorum_id, rank % order.ranks)
        crews.setdefault(name, []).append(rank)
    return crews


def _fetch(address: str) -> tuple[bytes, bytes]:
    """Nothing when the rank does not answer: that is evidence, too."""
    try:
        return fetch_record(address, timeout_s=FETCH_TIMEOUT_S)
    except (FtError, OSError):
        return b"", b""


def _stands(case: Case) -> dict[int, str]:
    """Where the main thread of each rank is, in the user's own code if possible."""
    stacks = case.beside.evidence.stacks
    return {s.rank: where(s.frames) for s in stacks if s.thread == "MainThread" and s.frames}


def _write_page(path: Path, case: Case) -> None:
    from flightrec.render.board import layout
    from flightrec.render.page import page

    board = layout(case.records, case.report)
    path.write_text(page(case.records, case.report, case.beside.evidence, board))


def main() -> None:
    logging.disable(logging.WARNING)
    try:
        answer = look(Order.from_json(sys.argv[1]))
    except NoDumps as error:
        answer = {"report": None, "stands": {}, "why": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
