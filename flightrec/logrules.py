"""The rules by which log lines name a culprit; the first rule that names somebody decides.

A rank is only named for what its own lines, or its silence, show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from flightrec.logbook import DEFAULT_GROUP, RankLog
from flightrec.logview import LogView, Slot, Wait, group_label
from flightrec.model import Culprit, Kind, RasState, Site
from flightrec.render import words

SIGABRT, SIGTERM = -6, -15
SAME_SIZE_OPS = {"allreduce", "broadcast", "reduce", "allgather_base", "reduce_scatter_base"}


def _exited(view: LogView) -> Iterator[Culprit]:
    """A process that ended by itself: the launcher or its own traceback says so."""
    for end in view.evidence.exits:
        if not end.is_first_cause or end.code in (0, SIGABRT, SIGTERM):
            continue
        because = [f"Rank {end.rank} raised {end.error!r}."] if end.error else []
        if end.signal or end.code not in (None, 1):
            how = end.signal or f"exit code {end.code}"
            because.append(f"The launcher saw rank {end.rank} fail first, with {how}.")
        because += _survivors(view, end.rank)
        yield _culprit(view, end.rank, Kind.DIED, confidence=0.9, because=because)


def _absent_at_setup(view: LogView) -> Iterator[Culprit]:
    """Somebody never came to the rendezvous, or never published the communicator's id."""
    logs = view.book.ranks.values()
    waiting = {log.setup_waits_for for log in logs if log.setup_waits_for is not None}
    stuck = {log.rank for log in logs if log.setup_waits_for is not None}
    for rank in sorted(waiting - stuck):
        because = [f"{_names(stuck)} wait for rank {rank} to publish the communicator's id."]
        yield _culprit(view, rank, Kind.INIT_HANG, confidence=0.75, because=because)
    if view.book.clients and not waiting:
        joined, expected = view.book.clients
        if len(view.unheard) == expected - joined:
            because = [f"Only {joined} of {expected} ranks came to the rendezvous."]
            for rank in view.unheard:
                yield _culprit(view, rank, Kind.INIT_HANG, confidence=0.7, because=because)
    for rank in view.book.absent:
        because = [f"monitored_barrier found rank {rank} missing."]
        yield _culprit(view, rank, Kind.NEVER_ISSUED, confidence=0.9, because=because)


def _vanished(view: LogView) -> Iterator[Culprit]:
    """Connections broke, or everybody else spoke, and of these ranks there is no word."""
    seen = [log.rank for log in view.book.ranks.values() if log.saw_remote_exit]
    unheard = view.unheard if seen and len(view.unheard) == 1 else ()
    quiet = view.silent or unheard
    answered = [log.rank for log in view.book.ranks.values() if log.has_answered]
    others = len(view.book.ranks) - len(view.silent)
    lost = view.waits or any(log.raised for log in view.book.ranks.values())
    if not quiet or not lost or 2 * len(quiet) > others + len(quiet):
        return
    for rank in quiet:
        because = [f"Rank {rank} wrote no watchdog line and did not answer the dump signal."]
        if seen:
            because.insert(0, f"{_names(seen)} lost a connection: a remote process exited.")
        kind = Kind.DIED if seen or answered else Kind.NEVER_ISSUED
        if kind is Kind.NEVER_ISSUED:
            because = [
                f"Rank {rank} is the only one that reports no hanging call; it may have died."
            ]
        yield _culprit(view, rank, kind, confidence=0.85 if seen else 0.6, because=because)


def _not_issued(view: LogView) -> Iterator[Culprit]:
    """Alive, waiting nowhere, and a call short of those who wait."""
    busy = set(view.waiting_ranks)
    roots = {rank: wait for rank, wait in view.behind.items() if rank not in busy}
    for wait in sorted({(w.group, w.seq) for w in roots.values()}):
        late = [rank for rank, w in roots.items() if (w.group, w.seq) == wait]
        waiters = [w.rank for w in view.waits if w.group == wait[0] and w.seq >= wait[1]]
        if len(waiters) >= len(late):
            for rank in late:
                yield _culprit(
                    view,
                    rank,
                    Kind.NEVER_ISSUED,
                    confidence=0.85 if len(waiters) > len(late) else 0.7,
                    because=_late(view, rank, roots[rank], waiters),
                    wait=roots[rank],
                )
        elif len(waiters) == 1 and len(late) >= 3 and _is_whole(view):
            yield _extra(view, roots[late[0]], late)


def _extra(view: LogView, wait: Wait, late: list[int]) -> Culprit:
    text = f"Rank {wait.rank} alone issued {wait.call}; {words.ranks(late)} are alive and did not."
    return _culprit(view, wait.rank, Kind.EXTRA_CALL, confidence=0.55, because=[text], wait=wait)


def _idle_in_subgroup(view: LogView) -> Iterator[Culprit]:
    """A group has a member about which nobody spoke, and exactly these ranks wait in nothing."""
    slots = [slot for slot in view.slots if slot.is_lagging] or list(view.slots)
    free = [rank for rank in view.idle if rank not in view.behind]
    if not slots or not free or len(free) > len(view.slots):
        return
    waiting = view.waiting_ranks
    for rank in free:
        slot = slots[0] if len({s.group for s in slots}) == 1 or len(free) == 1 else None
        because = [
            f"{_names(waiting)} wait in a call; rank {rank} answered the dump signal and waits in "
            "none, so it is busy or stuck on the host."
        ]
        if slot:
            label = group_label(slot.group, slot.desc)
            because.append(f"{label} lacks a member at call #{slot.seq}, and only it is free.")
        yield _culprit(
            view,
            rank,
            Kind.NEVER_ISSUED,
            confidence=0.8 if len(free) == 1 else 0.65,
            because=because,
            wait=_at_slot(view, slot or slots[0]),
        )


def _at_slot(view: LogView, slot: Slot) -> Wait:
    return next(w for w in view.waits if (w.group, w.seq) == (slot.group, slot.seq))


def _fewer_calls(view: LogView) -> Iterator[Culprit]:
    """NCCL RAS: a process is dead, or a few ranks of a communicator launched fewer calls."""
    waiting = set(view.waiting_ranks)
    states = _of_the_world(view.evidence.ras)
    for state in states:
        if state.is_dead:
            because = ["NCCL RAS considers its process dead."]
            yield _culprit(view, state.rank, Kind.DIED, confidence=0.75, because=because)
    present = [state for state in states if not state.is_missing]
    for op in sorted({name for state in present for name in state.counts}):
        most = max(state.counts.get(op, 0) for state in present)
        late = [s for s in present if s.counts.get(op, 0) < most and s.rank not in waiting]
        if 2 * len(late) < len(present):
            for one in late:
                text = f"NCCL RAS: rank {one.rank} launched {one.counts.get(op, 0)} {op} calls, "
                text += f"the others up to {most}."
                yield _culprit(view, one.rank, Kind.NEVER_ISSUED, confidence=0.75, because=[text])


def _of_the_world(states: tuple[RasState, ...]) -> list[RasState]:
    """States of the largest communicator, whose ranks are those of the job."""
    largest = max(states, key=lambda s: (len(s.members), s.communicator), default=None)
    if largest is None:
        return []
    return [state for state in states if state.communicator == largest.communicator]


def _odd_call(view: LogView) -> Iterator[Culprit]:
    """All wait in one call, and a few of them called something else or another size."""
    for name, seq in sorted({(w.group, w.seq) for w in view.waits}):
        here = [w for w in view.waits if (w.group, w.seq) == (name, seq) and w.op]
        ops = Counter(w.op for w in here)
        yield from _minority(view, here, ops, Kind.WRONG_OP)
        if len(ops) == 1 and here and here[0].op in SAME_SIZE_OPS:
            sizes = Counter(str(w.work.numel_in) for w in here if w.work)
            yield from _minority(view, here, sizes, Kind.SIZE_MISMATCH)


def _minority(
    view: LogView, here: list[Wait], values: Counter[str], kind: Kind
) -> Iterator[Culprit]:
    if len(values) != 2 or len(here) < 3:
        return
    (usual, many), (odd, few) = values.most_common()
    if few * 2 >= many or not _is_whole(view):
        return
    what = "elements" if kind is Kind.SIZE_MISMATCH else ""
    for wait in here:
        value = str(wait.work.numel_in) if kind is Kind.SIZE_MISMATCH and wait.work else wait.op
        if value == odd:
            text = f"Rank {wait.rank} called it with {odd} {what}".rstrip()
            text += f", the {many} others with {usual}."
            done = kind is Kind.WRONG_OP and odd == "barrier"  # what comes after the loop
            shown = Kind.UNEVEN_INPUTS if done else kind
            yield _culprit(view, wait.rank, shown, confidence=0.75, because=[text], wait=wait)


def _left_p2p(view: LogView) -> Iterator[Culprit]:
    """All members but one wait in sends and receives; that one has gone on to a collective."""
    for name in sorted({w.group for w in view.waits}):
        here = [w for w in view.waits if w.group == name]
        pairs = [w for w in here if w.op in ("send", "recv")]
        gone = [w for w in here if w.op and not w.is_p2p]
        if len(gone) == 1 and len(pairs) >= 2 and len(here) == len(view.members.get(name, ())):
            calls = "; ".join(f"rank {w.rank} in {w.op} #{w.seq}" for w in pairs)
            because = [
                f"All others wait for a partner: {calls}.",
                f"Rank {gone[0].rank} alone has gone on to {gone[0].call}.",
            ]
            yield _culprit(
                view,
                gone[0].rank,
                Kind.P2P_NO_PARTNER,
                confidence=0.6,
                because=because,
                wait=gone[0],
            )


def _before_p2p(view: LogView) -> Iterator[Culprit]:
    """Everybody waits in a send or recv, but for one rank that is alive and waits in nothing."""
    waiting = set(view.waiting_ranks)
    all_p2p = len(waiting) >= 2 and all(wait.is_p2p and wait.op for wait in view.waits)
    if not all_p2p or len(view.idle) != 1 or waiting | set(view.idle) != set(view.book.ranks):
        return
    if _is_whole(view):
        because = [
            f"{_names(waiting)} wait in a send or recv; rank {view.idle[0]} answered the dump "
            "signal and waits in nothing, so it is busy or stuck on the host."
        ]
        wait = _first(view)
        yield _culprit(
            view, view.idle[0], Kind.NEVER_ISSUED, confidence=0.6, because=because, wait=wait
        )


def _gave_up_early(view: LogView) -> Iterator[Culprit]:
    """One rank timed out in a call in which the others had more time and only lost it."""
    for place in sorted({(w.group, w.seq) for w in view.waits}):
        works = {w.rank: w.work for w in view.waits if (w.group, w.seq) == place and w.work}
        limits = {rank: work.timeout_ms for rank, work in works.items() if work.timeout_ms}
        least = min(limits.values(), default=0)
        early = [rank for rank, limit in limits.items() if limit == least]
        others = [rank for rank in limits if rank not in early]
        timed_out = [rank for rank in limits if works[rank].ran_ms is not None]
        if len(early) == 1 and len(others) >= 2 and timed_out == early:
            more = min(limits[rank] or 0 for rank in others)
            text = f"Rank {early[0]} gave up after {least} ms; the others allow {more} ms or more."
            wait = next(w for w in view.waits if w.rank == early[0])
            yield _culprit(
                view, early[0], Kind.ONE_SIDED_TIMEOUT, confidence=0.65, because=[text], wait=wait
            )


RULES: tuple[Callable[[LogView], Iterator[Culprit]], ...] = (
    _exited,
    _absent_at_setup,
    _vanished,
    _not_issued,
    _idle_in_subgroup,
    _fewer_calls,
    _odd_call,
    _left_p2p,
    _before_p2p,
    _gave_up_early,
)


def _is_whole(view: LogView) -> bool:
    """Whether every rank of the job (as far as known) has spoken."""
    ranks = view.book.ranks
    size_known = view.book.world_size == len(ranks)
    return size_known or all(log.is_own_file for log in ranks.values())


def _first(view: LogView) -> Wait | None:
    return min(view.waits, key=lambda w: (w.is_p2p, w.seq, w.rank), default=None)


def _common(view: LogView) -> Wait | None:
    """The call in which everybody waits. After a death survivors may stop at different calls,
    and then none of them is the one that the dead rank did not make."""
    first = _first(view)
    same = first and {(w.group, w.seq) for w in view.waits} == {(first.group, first.seq)}
    return first if same else None


def _late(view: LogView, rank: int, wait: Wait, waiters: list[int]) -> list[str]:
    said = [f"{_names(waiters)} wait in {wait.call}, which rank {rank} has not called."]
    log = view.book.ranks.get(rank)
    if log is None:
        return [*said, f"The desync report says so; there are no lines of rank {rank} itself."]
    if log.raised is not None and not log.raised.is_communication:
        said.append(f"It raised {log.raised.text!r} and is still alive.")
    at = next((g.frontier for g in log.groups if g.name == wait.group), None)
    if at is not None:
        said.append(
            f"Rank {rank} printed {at.last_enqueued} as its last enqueued and "
            f"{at.last_completed} as its last completed call: nothing of it is outstanding."
        )
    said.append(
        "It is busy or stuck on the host, or it left out an earlier call: lines cannot tell which."
    )
    return said


def _survivors(view: LogView, rank: int) -> list[str]:
    seen = [r for r, log in view.book.ranks.items() if log.saw_remote_exit and r != rank]
    return [f"{_names(seen)} lost a connection: a remote process exited."] if seen else []


def _culprit(
    view: LogView,
    rank: int,
    kind: Kind,
    *,
    confidence: float,
    because: list[str],
    wait: Wait | None = None,
) -> Culprit:
    wait = wait or view.behind.get(rank) or _common(view)
    log = view.book.ranks.get(rank)
    stack = _stack(log, wait, kind)
    return Culprit(
        rank=rank,
        kind=kind,
        group=group_label(wait.group, wait.desc) if wait else "default_pg",
        group_ranks=_members(view, wait, rank),
        seq=wait.seq if wait else None,
        op=wait.op if wait else "",
        where=where(stack),
        confidence=confidence,
        because=tuple(because),
        stack=stack,
        is_hanging=bool(view.waits),
    )


def _members(view: LogView, wait: Wait | None, rank: int) -> tuple[int, ...]:
    """Who is known to belong to the group; the default group holds everybody."""
    if wait is None:
        return ()
    everybody = set(view.book.ranks) | set(view.unheard) if wait.group == DEFAULT_GROUP else set()
    return tuple(sorted({rank, *everybody, *view.members.get(wait.group, ())}))


def _stack(log: RankLog | None, wait: Wait | None, kind: Kind) -> Site:
    """Where the rank raised; else the call as those who wait made it."""
    if log is not None and log.raised is not None:
        return log.raised.site
    return wait.site if wait and kind is not Kind.DIED else ()


def where(site: Site) -> str:
    """The innermost line of the user's own code."""
    frame = words.user_frame(site)
    return str(frame) if frame and not words.is_library(frame.filename) else ""


def _names(ranks: Iterable[int]) -> str:
    """`Ranks 0, 2-5`, as a sentence starts."""
    text = words.ranks(ranks)
    return text[0].upper() + text[1:]
