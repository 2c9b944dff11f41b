"""Decides from log lines alone who caused a hang, or says what is missing to decide it.

The rules are tried in the order of `RULES`; the first that names somebody decides. Lines show how
far each rank got, not what it called, so many faults cannot be told from them: then the answer is
"undecided" with the evidence that would help. A rank is only named for what its own lines, or its
silence, show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from flightrec.logbook import DEFAULT_GROUP, LogBook, RankLog
from flightrec.logview import LogView, Slot, Wait, group_label, look
from flightrec.model import (
    Consequence,
    Culprit,
    Finding,
    Frame,
    Kind,
    Report,
    Site,
    Verdict,
)

SIGABRT, SIGTERM = -6, -15
SAME_SIZE_OPS = {"allreduce", "broadcast", "reduce", "allgather_base", "reduce_scatter_base"}
DUMPS = (
    "flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1,"
    " or write to TORCH_NCCL_DEBUG_INFO_PIPE_FILE)"
)
TIMING = "TORCH_NCCL_ENABLE_TIMING=1, so that dumps tell which rank's device has started the call"
ALL_LINES = "the watchdog lines of all ranks, one file a rank, or --world-size"


def diagnose_logs(book: LogBook, *, world_size: int | None = None) -> Report:
    """Return the verdict that the lines allow. The same lines in any order give the same report."""
    view = look(book, world_size=world_size)
    culprits = next((found for rule in RULES if (found := tuple(rule(view)))), ())
    summary, lacking = (_summary(culprits), ()) if culprits else _why_undecided(view)
    return Report(
        verdict=Verdict.FAULT if culprits else Verdict.UNDECIDED,
        summary=summary,
        culprits=culprits,
        consequences=_consequences(view, culprits),
        findings=tuple(_findings(view)),
        lacking=lacking,
        next_steps=_next_steps(culprits),
        world_size=max([world_size or book.world_size or 0, *(r + 1 for r in book.ranks)]),
        ranks_read=len(book.ranks),
        entries_read=0,
    )


def _exited(view: LogView) -> Iterator[Culprit]:
    """A process that ended by itself: the launcher or its own traceback says so."""
    first = {e.rank: e.code for e in view.book.exits if e.is_first}
    for rank, log in view.book.ranks.items():
        raised = log.raised
        own = raised is not None and not raised.is_communication and not log.is_waiting
        code = first.get(rank)
        if not own and (code in (None, SIGABRT, SIGTERM) or (raised and not own)):
            continue
        because = [f"Rank {rank} raised {raised.text!r}."] if own and raised else []
        if code is not None:
            because.append(f"The launcher saw rank {rank} fail first, with exit code {code}.")
        because += _survivors(view, rank)
        yield _culprit(view, rank, Kind.DIED, confidence=0.9, because=because)
    for rank in sorted(set(first) - set(view.book.ranks)):
        if first[rank] not in (SIGABRT, SIGTERM):
            text = f"The launcher saw rank {rank} fail first, with exit code {first[rank]}."
            yield _culprit(view, rank, Kind.DIED, confidence=0.9, because=[text])


def _absent_at_setup(view: LogView) -> Iterator[Culprit]:
    """Somebody never came to the rendezvous, or never published the communicator's id."""
    logs = view.book.ranks.values()
    waiting = {log.setup_waits_for for log in logs if log.setup_waits_for is not None}
    stuck = {log.rank for log in logs if log.setup_waits_for is not None}
    for rank in sorted(waiting - stuck):
        because = [f"{_ranks(stuck)} wait for rank {rank} to publish the communicator's id."]
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
    if not quiet or not view.waits or 2 * len(quiet) > others + len(quiet):
        return
    for rank in quiet:
        because = [f"Rank {rank} wrote no watchdog line and did not answer the dump signal."]
        if seen:
            because.insert(0, f"{_ranks(seen)} lost a connection: a remote process exited.")
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
    text = f"Rank {wait.rank} alone issued {wait.call}; {_ranks(late)} are alive and did not."
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
            f"{_ranks(waiting)} wait in a call; rank {rank} answered the dump signal and waits in "
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
    if few * 2 >= many or not _is_whole(view, name=here[0].group):
        return
    what = "elements" if kind is Kind.SIZE_MISMATCH else ""
    for wait in here:
        value = str(wait.work.numel_in) if kind is Kind.SIZE_MISMATCH and wait.work else wait.op
        if value == odd:
            text = f"Rank {wait.rank} called it with {odd} {what}".rstrip()
            text += f", the {many} others with {usual}."
            yield _culprit(view, wait.rank, kind, confidence=0.75, because=[text], wait=wait)


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


RULES: tuple[Callable[[LogView], Iterator[Culprit]], ...] = (
    _exited,
    _absent_at_setup,
    _vanished,
    _not_issued,
    _idle_in_subgroup,
    _odd_call,
    _left_p2p,
)


def _is_whole(view: LogView, *, name: str = DEFAULT_GROUP) -> bool:
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
    said = [f"{_ranks(waiters)} wait in {wait.call}, which rank {rank} has not called."]
    log = view.book.ranks.get(rank)
    if log is None:
        return [*said, f"The desync report says so; there are no lines of rank {rank} itself."]
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
    return [f"{_ranks(seen)} lost a connection: a remote process exited."] if seen else []


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
        group_ranks=view.members.get(wait.group, ()) if wait else (),
        seq=wait.seq if wait else None,
        op=wait.op if wait else "",
        where=where(stack),
        confidence=confidence,
        because=tuple(because),
        stack=stack,
        is_hanging=bool(view.waits),
    )


def _stack(log: RankLog | None, wait: Wait | None, kind: Kind) -> Site:
    """Where the rank raised; else the call as those who wait made it."""
    if log is not None and log.raised is not None:
        return log.raised.site
    return wait.site if wait and kind is not Kind.DIED else ()


def where(site: Site) -> str:
    """The innermost line of the user's own code."""
    return str(next((frame for frame in site if not _is_library(frame)), "")) if site else ""


def _is_library(frame: Frame) -> bool:
    return "site-packages" in frame.filename or "/torch/" in frame.filename


def _ranks(ranks: object) -> str:
    known = sorted(ranks) if isinstance(ranks, list | tuple | set) else []
    if len(known) > 8:
        return f"{len(known)} ranks ({known[0]}, {known[1]}, …, {known[-1]})"
    return ("rank " if len(known) == 1 else "ranks ") + ", ".join(map(str, known))


def _summary(culprits: tuple[Culprit, ...]) -> str:
    first = culprits[0]
    names = _ranks([c.rank for c in culprits if c.kind is first.kind])
    at = f" at {first.op or 'call'} #{first.seq} of {first.group}" if first.seq is not None else ""
    text = {
        Kind.DIED: f"died; the others stop{at}",
        Kind.NEVER_ISSUED: f"never came to the call{at}",
        Kind.INIT_HANG: "never came to the set-up of the group",
        Kind.EXTRA_CALL: f"made a call that nobody else made{at}",
        Kind.WRONG_OP: f"called another operation{at}",
        Kind.SIZE_MISMATCH: f"called with another size{at}",
        Kind.P2P_NO_PARTNER: "left its partners waiting in send and recv",
    }
    return f"{names[0].upper()}{names[1:]} {text.get(first.kind, first.kind.value)}."


def _why_undecided(view: LogView) -> tuple[str, tuple[str, ...]]:
    if not view.waits:
        return (
            "No line reports a hang or an exit; lines alone do not show whether calls matched.",
            (DUMPS,),
        )
    if any(log.saw_remote_exit for log in view.book.ranks.values()):
        speak = _ranks(list(view.book.ranks))
        return f"A remote process exited, but no line says which; {speak} speak.", (ALL_LINES,)
    if view.behind or view.silent or view.unheard:
        return "Several explanations fit these lines.", (ALL_LINES, DUMPS)
    if all(wait.is_p2p for wait in view.waits):
        names = _ranks(view.waiting_ranks)
        return f"{names.capitalize()} wait in a send or recv; no line names the partner.", (DUMPS,)
    first = min(view.waits, key=lambda w: (w.is_p2p, w.seq))
    done = [
        r
        for r, log in view.book.ranks.items()
        for g in log.groups
        if g.name == first.group and g.has_status and g.frontier.last_completed >= first.seq
    ]
    if done:
        waiting = sorted({w.rank for w in view.waits})
        text = f"{_ranks(done)} completed {first.call}, {_ranks(waiting)} did not".capitalize()
        return f"{text}: a call did not match on some rank.", (DUMPS,)
    return (
        f"Everybody who spoke has issued {first.call}, and nobody completed it.",
        (TIMING, DUMPS) if len(view.waiting_ranks) > 1 else (ALL_LINES, DUMPS),
    )


def _consequences(view: LogView, culprits: tuple[Culprit, ...]) -> tuple[Consequence, ...]:
    guilty = tuple(sorted({c.rank for c in culprits}))
    found = []
    for rank in view.waiting_ranks:
        wait = view.wait_of(rank)
        if rank in guilty or wait is None:
            continue
        found.append(
            Consequence(
                rank=rank,
                waits_for=guilty,
                group=group_label(wait.group, wait.desc),
                seq=wait.seq,
                op=wait.op,
                where=where(wait.site),
            )
        )
    return tuple(found)


def _findings(view: LogView) -> Iterator[Finding]:
    yield Finding(
        code="log_only",
        text="This verdict rests on log lines; dumps would also show calls, sizes and sources.",
    )
    if view.unheard:
        text = f"There is no line of {_ranks(view.unheard)}."
        yield Finding(code="no_lines", text=text, ranks=view.unheard)
    for raised in view.book.orphans:
        text = f"A traceback that names no rank: {raised.text} ({where(raised.site)})."
        yield Finding(code="traceback", text=text)


def _next_steps(culprits: tuple[Culprit, ...]) -> tuple[str, ...]:
    if not culprits:
        return ("Collect what is lacking and run `flightrec analyze` on all of it together.",)
    first, steps = culprits[0], []
    if first.kind is Kind.DIED:
        steps.append(
            f"Read the end of rank {first.rank}'s log and its host's kernel log (OOM, XID)."
        )
    elif first.kind is Kind.NEVER_ISSUED:
        steps.append(
            f"Take rank {first.rank}'s Python stack (py-spy dump --pid PID) while it hangs."
        )
    elif first.kind is Kind.INIT_HANG:
        steps.append(
            f"Check that rank {first.rank} starts, and reaches the same rendezvous address."
        )
    else:
        steps.append(f"Compare what rank {first.rank} runs with the other ranks at this call.")
    return (*steps, f"To be surer, add {DUMPS}.")
