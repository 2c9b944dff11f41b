"""Decide whether two ranks' calls may be one collective: what must be equal, and what differs."""

from __future__ import annotations

from dataclasses import dataclass

from flightrec.model import Call, Kind


@dataclass(frozen=True, slots=True)
class Token:
    """What must be equal on all members of a group for a call to be one collective."""

    op: str  # canonical: lower case, without underscores
    dtypes: tuple[str, ...] = ()
    numels: tuple[int, ...] = ()


def canonical(op: str) -> str:
    """ "_ALLGATHER_BASE" of a log line and "_all_gather_base" of a dump are one operation."""
    return op.lower().replace("_", "")


def token_of(call: Call) -> Token:
    """Reduce a call to what all members must share; the root's part and a free size drop out."""
    op = canonical(call.op)
    ins, outs = _numels(call.input_sizes), _numels(call.output_sizes)
    dtypes = call.input_dtypes or call.output_dtypes
    if op.endswith("barrier") or op == "coalesced":
        return Token(op)
    if op.startswith("alltoall"):
        return Token(op, _distinct(dtypes))
    if op in ("gather", "scatter"):
        return Token(op, _distinct(dtypes), (_share(ins, outs),))
    if op.startswith("allgather"):
        return Token(op, _distinct(dtypes), (sum(outs),) if "coalesced" not in op else outs)
    if op.startswith("reducescatter"):
        return Token(op, _distinct(dtypes), (sum(ins),) if "coalesced" not in op else ins)
    return Token(op, _distinct(call.input_dtypes + call.output_dtypes), ins or outs)


def roots_itself(call: Call) -> bool:
    """Whether the sizes show that this rank takes itself for the root of a gather or scatter."""
    if canonical(call.op) not in ("gather", "scatter"):
        return False
    ins, outs = sum(_numels(call.input_sizes)), sum(_numels(call.output_sizes))
    return min(ins, outs) > 0 and max(ins, outs) > min(ins, outs)


def difference(wrong: Token, right: Token) -> Kind:
    """The kind of fault when one rank called `wrong` where the others called `right`."""
    if wrong.op != right.op:
        return Kind.WRONG_OP
    if wrong.dtypes != right.dtypes:
        return Kind.DTYPE_MISMATCH
    return Kind.SIZE_MISMATCH


def describe(call: Call) -> str:
    """ "all_reduce of 1024 Float", for sentences."""
    ins = _numels(call.input_sizes) or _numels(call.output_sizes)
    dtypes = _distinct(call.input_dtypes or call.output_dtypes)
    if call.is_p2p:
        arrow = "to" if call.op == "send" else "from"
        return f"{call.op} {arrow} {call.peer} of {_amount(ins)} {'/'.join(dtypes)}".strip()
    if not ins or canonical(call.op).endswith("barrier"):
        return call.op
    return f"{call.op} of {_amount(ins)} {'/'.join(dtypes)}".strip()


def _amount(numels: tuple[int, ...]) -> str:
    if len(numels) <= 3:
        return "+".join(map(str, numels)) or "0"
    return f"{sum(numels)} in {len(numels)} tensors"


def _numels(sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found = []
    for size in sizes:
        numel = 1
        for extent in size:
            numel *= extent
        found.append(numel)
    return tuple(found)


def _share(ins: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """One member's part of a gather or scatter: the smaller side that is not empty."""
    sides = [total for total in (sum(ins), sum(outs)) if total]
    return min(sides, default=0)


def _distinct(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(dtypes)))
