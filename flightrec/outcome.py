"""Put the outcome into sentences: the summary, what to do next, and what evidence is lacking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flightrec.mismatch import Divergence
from flightrec.model import Culprit, Evidence, Finding, Kind, Verdict
from flightrec.stalls import TIMING
from flightrec.suspects import Case, shown, where
from flightrec.waits import Waits

_DID = {
    Kind.NEVER_ISSUED: "never made",
    Kind.DIED: "died before or in",
    Kind.WRONG_OP: "called another operation at",
    Kind.SIZE_MISMATCH: "called with another size at",
    Kind.DTYPE_MISMATCH: "called with another type at",
    Kind.ROOT_MISMATCH: "called with another root at",
    Kind.REDUCE_OP_MISMATCH: "probably called with another reduce operation at",
    Kind.ORDER_INVERSION: "called in another order than the others at",
    Kind.SKIPPED_CALL: "left out",
    Kind.EXTRA_CALL: "made a call too many at",
    Kind.DEVICE_STALL: "made the call, but its device never took part in",
    Kind.P2P_NO_PARTNER: "never called the other end of a send or receive at",
    Kind.UNEVEN_INPUTS: "had another number of inputs: it parted from the others at",
    Kind.STRAGGLER: "is late at",
    Kind.INIT_HANG: "never joined the set-up of the group at",
    Kind.ONE_SIDED_TIMEOUT: "has a shorter time limit than the others at",
    Kind.UNKNOWN: "is at fault at",
}

_ADVICE = {
    Kind.NEVER_ISSUED: "Look at that rank's Python stack: it is stuck or busy before the call.",
    Kind.DIED: "Read the end of that rank's log and the host's kernel log (killed, out of memory).",
    Kind.WRONG_OP: "Compare the two source lines: a branch depends on something of one rank only.",
    Kind.SIZE_MISMATCH: "Compare the tensor's shape on that rank with the others before the call.",
    Kind.DTYPE_MISMATCH: "Compare the tensor's type on that rank with the others before the call.",
    Kind.ROOT_MISMATCH: "Compare the root (src, dst) that each rank passes.",
    Kind.REDUCE_OP_MISMATCH: "Compare the reduce operation that the two source lines pass.",
    Kind.ORDER_INVERSION: "Make all ranks call the two groups in the same order.",
    Kind.SKIPPED_CALL: "Look for a branch around the call that only that rank did not take.",
    Kind.EXTRA_CALL: "Look for a branch around the call that only that rank took.",
    Kind.DEVICE_STALL: "Look at that rank's device: long kernels, clocks, Xid errors, nvidia-smi.",
    Kind.P2P_NO_PARTNER: "Compare the number of microbatches on the two ends.",
    Kind.UNEVEN_INPUTS: "Give all ranks the same number of batches, or use Join.",
    Kind.STRAGGLER: "Look at that rank's input pipeline, host load and device clocks.",
    Kind.INIT_HANG: "All ranks must call new_group, in the same order, members or not.",
    Kind.ONE_SIDED_TIMEOUT: "Give all ranks the same timeout.",
    Kind.UNKNOWN: "Compare that rank's log with the others'.",
}


def summary_of(
    verdict: Verdict, culprits: Sequence[Culprit], waits: Waits, lacking: Sequence[str]
) -> str:
    """One sentence."""
    if verdict is Verdict.HEALTHY:
        return "Nothing is wrong: every call has ended and all ranks made the same calls."
    if not culprits:
        stuck = f"{len(waits.blocked)} ranks wait" if waits.blocked else "No rank waits"
        return f"{stuck}, but the dumps do not tell who caused it."
    first = culprits[0]
    call = f"call {first.seq} ({first.op or 'unknown'}) of group {first.group}"
    more = f", and {len(culprits) - 1} more" if len(culprits) > 1 else ""
    return f"Rank {first.rank} {_DID[first.kind]} {call}{more}."


def advice(culprits: Sequence[Culprit]) -> tuple[str, ...]:
    """What to do next, one sentence a kind."""
    return tuple(_ADVICE[kind] for kind in dict.fromkeys(c.kind for c in culprits))


def lacking_evidence(
    case: Case,
    divergences: Sequence[Divergence],
    waits: Waits,
    findings: Sequence[Finding],
) -> tuple[str, ...]:
    """What would decide, when nobody can be named; empty when nothing is wrong."""
    lacking = [f"logs or exit codes: {f.text}" for f in findings if f.code == "several_missing"]
    for d in divergences:
        if d.is_undecided:
            lacking.append(
                f"what ranks {shown(d.ranks)} should have called at call {d.seq} of "
                f"{case.name(d.group)}: they disagree and there is no majority"
            )
    if waits.blocked and not lacking:
        lacking += [TIMING, "the Python stacks of all ranks (py-spy dump) and NCCL's RAS output"]
    missing = case.records.missing_ranks
    if missing and not lacking:
        lacking.append(f"the dumps of ranks {shown(missing)}; nobody waits for them")
    entries = any(r.columns or r.frontiers for r in case.records.ranks.values())
    if not entries:
        lacking.append(
            "recorded calls: every dump is empty (is the group set up? TORCH_FR_BUFFER_SIZE)"
        )
    return tuple(lacking)


def with_evidence(culprit: Culprit, evidence: Evidence) -> Culprit:
    """Add what exit codes, stacks and RAS say of the culprit."""
    because, confidence, stack, place = (
        list(culprit.because),
        culprit.confidence,
        culprit.stack,
        culprit.where,
    )
    for state in evidence.ras:
        if state.rank == culprit.rank and state.error:
            because.append(f"NCCL's RAS service: {state.error}")
    for known in evidence.stacks:
        if known.rank == culprit.rank and known.frames and culprit.kind is not Kind.DIED:
            stack, place = known.frames, where(known.frames)
            because.append(f"its Python stack stands at {place}")
            confidence = min(0.98, confidence + 0.05)
            break
    return replace(
        culprit, because=tuple(because), confidence=round(confidence, 2), stack=stack, where=place
    )
