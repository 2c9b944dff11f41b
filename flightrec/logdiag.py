"""Decides from log lines alone who caused a hang, or says what is missing to decide it.

Lines show how far each rank got, not what it called, so many faults cannot be told from them: then
the answer is "undecided", with the evidence that would help.
"""

from __future__ import annotations

from collections.abc import Iterator

from flightrec.logbook import LogBook
from flightrec.logrules import RULES, where
from flightrec.logview import LogView, group_label, look
from flightrec.model import Consequence, Culprit, Evidence, Finding, Kind, Report, Verdict
from flightrec.render import words

DUMPS = (
    "flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1,"
    " or write to TORCH_NCCL_DEBUG_INFO_PIPE_FILE)"
)
TIMING = "TORCH_NCCL_ENABLE_TIMING=1, so that dumps tell which rank's device has started the call"
ALL_LINES = "the watchdog lines of all ranks, one file a rank, or --world-size"


def diagnose_logs(
    book: LogBook, *, evidence: Evidence | None = None, world_size: int | None = None
) -> Report:
    """Return the verdict that the lines allow. The same lines in any order give the same report."""
    view = look(book, evidence=evidence, world_size=world_size)
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


def _summary(culprits: tuple[Culprit, ...]) -> str:
    first = culprits[0]
    names = words.ranks([c.rank for c in culprits if c.kind is first.kind])
    at = f" at {first.op or 'call'} #{first.seq} of {first.group}" if first.seq is not None else ""
    text = {
        Kind.DIED: f"died; the others stop{at}",
        Kind.NEVER_ISSUED: f"never came to the call{at}",
        Kind.INIT_HANG: "never came to the set-up of the group",
        Kind.EXTRA_CALL: f"made a call that nobody else made{at}",
        Kind.WRONG_OP: f"called another operation{at}",
        Kind.SIZE_MISMATCH: f"called with another size{at}",
        Kind.UNEVEN_INPUTS: f"left its loop before the others{at}",
        Kind.ONE_SIDED_TIMEOUT: f"gave up alone{at}",
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
        speak = words.ranks(list(view.book.ranks))
        return f"A remote process exited, but no line says which; {speak} speak.", (ALL_LINES,)
    if view.behind or view.silent or view.unheard:
        return "Several explanations fit these lines.", (ALL_LINES, DUMPS)
    if all(wait.is_p2p for wait in view.waits):
        names = words.ranks(view.waiting_ranks).capitalize()
        verb = "waits" if len(view.waiting_ranks) == 1 else "wait"
        return f"{names} {verb} in a send or recv; no line names the partner.", (DUMPS,)
    first = min(view.waits, key=lambda w: (w.is_p2p, w.seq))
    done = [
        r
        for r, log in view.book.ranks.items()
        for g in log.groups
        if g.name == first.group and g.has_status and g.frontier.last_completed >= first.seq
    ]
    if done:
        waiting = sorted({w.rank for w in view.waits})
        text = (
            f"{words.ranks(done).capitalize()} completed {first.call}, {words.ranks(waiting)} not"
        )
        return f"{text}: a call did not match on some rank.", (DUMPS,)
    at = {w.seq: w.rank for w in view.waits if w.group == first.group and not w.is_p2p}
    if len(at) > 1:
        low, high = min(at), max(at)
        text = f"The ranks wait in different calls: rank {at[low]} in #{low}, rank {at[high]} in "
        return f"{text}#{high} of {group_label(first.group, first.desc)}.", (ALL_LINES, DUMPS)
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
        text = f"There is no line of {words.ranks(view.unheard)}."
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
