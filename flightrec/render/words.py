"""The words in which reports are told, shared by the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flightrec.model import Consequence, Culprit, Frame, Kind, Report, Site, Verdict
from flightrec.suspects import LIBRARY

KIND = {
    Kind.NEVER_ISSUED: "never issued the call",
    Kind.DIED: "died",
    Kind.WRONG_OP: "called another operation",
    Kind.SIZE_MISMATCH: "called with another size",
    Kind.DTYPE_MISMATCH: "called with another dtype",
    Kind.ROOT_MISMATCH: "named another root",
    Kind.REDUCE_OP_MISMATCH: "reduced with another operator",
    Kind.ORDER_INVERSION: "called two groups in another order",
    Kind.SKIPPED_CALL: "left out a call",
    Kind.EXTRA_CALL: "made a call too many",
    Kind.DEVICE_STALL: "issued the call, but its device has not started it",
    Kind.P2P_NO_PARTNER: "left a send or recv without its partner",
    Kind.UNEVEN_INPUTS: "ran out of input before the others",
    Kind.STRAGGLER: "is slow: the others wait for it at each call",
    Kind.INIT_HANG: "never finished setting up the communicator",
    Kind.ONE_SIDED_TIMEOUT: "gave up alone: its time-out is shorter",
    Kind.UNKNOWN: "is at fault in an unknown way",
}
VERDICT = {
    Verdict.HEALTHY: "HEALTHY",
    Verdict.FAULT: "FAULT",
    Verdict.UNDECIDED: "UNDECIDED",
}
PIECES_MAX = 6  # spans named before the rest is cut


def spans(ranks: Iterable[int]) -> str:
    """`0, 2-5, 9`: the ranks in order, neighbours joined when there are more than two."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    pieces = [_span(part) for part in parts]
    if len(pieces) > PIECES_MAX:
        pieces = [*pieces[: PIECES_MAX - 2], "…", pieces[-1]]
    return ", ".join(pieces)


def _span(part: Sequence[int]) -> str:
    return ", ".join(map(str, part)) if len(part) < 3 else f"{part[0]}-{part[-1]}"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2-5`, or `no rank`."""
    known = sorted(set(numbers))
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known[0]}"
    text = spans(known)
    return f"{len(known)} ranks ({text})" if "…" in text else f"ranks {text}"


def sentence(text: str) -> str:
    """A capital at the start and a stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def call(item: Culprit | Consequence) -> str:
    """`all_reduce #7 in default_pg`, with as much of it as is known."""
    op = item.op or "a call"
    number = f" #{item.seq}" if item.seq is not None else ""
    return f"{op}{number} in {item.group}" if item.group else f"{op}{number}"


def short_path(text: str) -> str:
    """The last three parts of a path, so that a source line fits on a screen line."""
    path, colon, rest = text.partition(":")
    parts = path.split("/")
    return ("…/" + "/".join(parts[-3:]) if len(parts) > 4 else path) + colon + rest


def user_frame(site: Site) -> Frame | None:
    """The innermost frame that is the user's own code; else the innermost one."""
    own = (frame for frame in site if not is_library(frame.filename))
    return next(own, site[0] if site else None)


def is_library(filename: str) -> bool:
    """Say whether a file belongs to torch or to Python itself."""
    return LIBRARY.search(filename) is not None


def kind(culprit: Culprit) -> str:
    return KIND.get(culprit.kind, str(culprit.kind))


def sure(confidence: float) -> str:
    """Confidence as a word and a number: `almost certain (0.97)`."""
    words = ((0.95, "almost certain"), (0.8, "very likely"), (0.6, "likely"), (0.0, "possible"))
    word = next(word for least, word in words if confidence >= least)
    return f"{word} ({confidence:.2f})"


def waiting(report: Report, *, lines_max: int) -> list[str]:
    """Who only waits, one line per call and awaited ranks, most ranks first."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for one in report.consequences:
        groups.setdefault((call(one), one.waits_for), []).append(one.rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1], item[0]))
    lines = [
        f"{ranks(who)} in {what}" + (f", for {ranks(whom)}" if whom else "")
        for (what, whom), who in ordered[:lines_max]
    ]
    if len(ordered) > lines_max:
        rest = sum(len(who) for _, who in ordered[lines_max:])
        lines.append(f"{rest} more in {len(ordered) - lines_max} other calls")
    return lines
