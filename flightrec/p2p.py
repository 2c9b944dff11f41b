"""Pair sends with receives, channel by channel, and find those whose other end was never called.

The two ends number their calls differently, but a channel (source, destination) is a queue: the
n-th send meets the n-th receive. Where a ring has wrapped, the first open calls of both ends meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flightrec.lanes import P2P, Lane
from flightrec.model import Call, Group, Kind
from flightrec.tokens import token_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """All sends of one rank to another in one group, and the receives over there."""

    group: int
    source: int  # global ranks
    destination: int
    sends: tuple[P2P, ...]
    receives: tuple[P2P, ...]
    is_wrapped: bool

    @property
    def lacking(self) -> int:
        """How many receives (above 0) or sends (below 0) were never called."""
        if self.is_wrapped:
            return _open(self.sends) - _open(self.receives)
        return len(self.sends) - len(self.receives)

    @property
    def unpaired(self) -> tuple[P2P, ...]:
        """The open calls whose other end was never called."""
        lacking = self.lacking
        surplus = self.sends if lacking > 0 else self.receives
        tail = surplus[len(surplus) - abs(lacking) :] if lacking else ()
        return tuple(call for call in tail if call.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClash:
    """A send and its receive disagree about size or type."""

    group: int
    rank: int
    kind: Kind
    wrong: P2P
    expected: int  # the call that the other end made


def channels(group: int, members: Group, lanes: Mapping[int, Lane]) -> list[Channel]:
    """Every channel on which a dump shows a call, in order of its ends."""
    sends: dict[tuple[int, int], list[P2P]] = {}
    receives: dict[tuple[int, int], list[P2P]] = {}
    for rank, lane in sorted(lanes.items()):
        for call in lane.p2p:
            if 0 <= call.peer < len(members.ranks):
                peer = members.ranks[call.peer]
                key = (rank, peer) if call.is_send else (peer, rank)
                (sends if call.is_send else receives).setdefault(key, []).append(call)
    return [
        Channel(
            group=group,
            source=source,
            destination=destination,
            sends=tuple(sends.get((source, destination), ())),
            receives=tuple(receives.get((source, destination), ())),
            is_wrapped=any(lanes[r].is_wrapped for r in (source, destination) if r in lanes),
        )
        for source, destination in sorted(sends.keys() | receives.keys())
    ]


def _open(calls: tuple[P2P, ...]) -> int:
    return sum(1 for call in calls if call.is_open)


def is_surplus(channel: Channel, all_channels: list[Channel]) -> bool:
    """Whether the longer side called too often, rather than the shorter too rarely: the other
    channels of the group show how many calls there are in each. A wrapped ring does not show."""
    if any(c.is_wrapped for c in all_channels):
        return False
    counts = Counter(
        len(side) for c in all_channels if c is not channel for side in (c.sends, c.receives)
    )
    usual, sides = counts.most_common(1)[0] if counts else (-1, 0)
    shorter, longer = sorted((len(channel.sends), len(channel.receives)))
    return sides > 2 and shorter == usual and longer != usual


def size_clashes(channel: Channel, calls: tuple[Call, ...]) -> Iterator[SizeClash]:
    """The first pair of a channel whose ends disagree; the channel's past tells who is wrong."""
    if channel.is_wrapped or not channel.sends or not channel.receives:
        return
    past: Counter[object] = Counter()
    for send, receive in zip(channel.sends, channel.receives, strict=False):
        out, into = token_of(calls[send.call]), token_of(calls[receive.call])
        content = (out.dtypes, out.numels)
        if content == (into.dtypes, into.numels):
            past[content] += 1
            continue
        sender_is_wrong = past[(into.dtypes, into.numels)] > past[content]
        if past[(into.dtypes, into.numels)] != past[content]:
            yield SizeClash(
                group=channel.group,
                rank=channel.source if sender_is_wrong else channel.destination,
                kind=Kind.DTYPE_MISMATCH if out.dtypes != into.dtypes else Kind.SIZE_MISMATCH,
                wrong=send if sender_is_wrong else receive,
                expected=receive.call if sender_is_wrong else send.call,
            )
        return


def odd_batch(lane: Lane, peer_calls: int) -> P2P | None:
    """The call at which a rank first made a batch unlike its others (it left an end out)."""
    batches: dict[int, list[P2P]] = {}
    for call in (call for call in lane.p2p if call.is_batched):
        batches.setdefault(call.p2p_seq, []).append(call)
    shapes = {seq: tuple((c.is_send, c.peer) for c in batch) for seq, batch in batches.items()}
    usual = Counter(shapes.values()).most_common(1)
    odd = (batches[seq][0] for seq in sorted(shapes) if shapes[seq] != usual[0][0])
    return next(odd, None) if peer_calls and len(shapes) > 2 else None
