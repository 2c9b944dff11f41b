"""Heal: take the state of other groups, from all of them at once, into the live state here."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftcore.base.log import event
from ftcore.heal.errors import HealFailed
from ftcore.heal.greeting import Greeting
from ftcore.heal.manifest import Manifest
from ftcore.heal.pace import Pace
from ftcore.heal.partial import Identity, Partial
from ftcore.heal.receiver import Receiver
from ftcore.heal.server import Offer
from ftcore.heal.sink import Sink
from ftcore.statedict import FlatState, LayoutDiffers, first_difference, prepare
from ftcore.statedict.memory import copy_in

log = logging.getLogger(__name__)

TICK_S = 0.05  # how often the calling thread looks at deadlines and slow sources


@dataclass(frozen=True, slots=True, kw_only=True)
class HealProgress:
    """How far a heal has come."""

    bytes_done: int
    bytes_total: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What one source delivered, and why it was given up if it was."""

    address: str
    bytes: int
    lost: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealReport:
    """A heal that succeeded: the state is that of `step`."""

    step: int
    quorum_id: int
    bytes: int
    seconds: float
    resumed_bytes: int  # of them, that a heal before had received
    sources: tuple[SourceReport, ...]


def heal(
    offers: Sequence[Offer],
    *,
    into: object,
    in_place: bool = True,
    deadline_s: float = 600.0,
    silent_s: float = 10.0,
    connections: int = 2,
    bandwidth_max: float | None = None,
    progress: Callable[[HealProgress], object] | None = None,
    partial: Partial | None = None,
) -> HealReport:
    """Make `into` bit for bit the state that `offers` offer, and return what it took.

    Call it on the training thread, between steps. All offers are of one step and quorum; the first
    is the primary: buffers, generators and plain values come from it alone. Parameters and
    optimizer state come from all of them, by `connections` connections each, faster ones giving
    more. A source that dies, falls silent for `silent_s` or sends damaged bytes is replaced by the
    others. With `in_place` bytes are received straight into the live tensors, so that a failure
    leaves them torn; without it they are kept aside until all are verified. `bandwidth_max` is in
    bytes a second. `progress` is called on this thread, every 50 ms at least; what it raises ends
    the heal (a manager that hears of a new quorum). With `partial`, kept by the caller, a heal that
    breaks off is gone on with by the next one of the same `state_id`.

    Raises LayoutDiffers, before anything is written, when the states do not have the same tensors,
    OfferRefused when no source serves this step any more, and HealFailed (its `is_torn` says
    whether tensors were written) when the sources together could not deliver.
    """
    _check_offers(offers)
    watch = _Watch(progress)
    reader = secrets.token_hex(8)
    greeting = Greeting(offers, reader=reader, silent_s=silent_s)
    primary, manifest, connection = greeting.run(watch.tell, every_s=TICK_S)
    with connection:  # open until the end: a source keeps its parts for a reader that is there
        flat = _prepared(into, primary, manifest)
        tensors = [flat.tensors[i].tensor for i in manifest.moving]
        partial = Partial() if partial is None else partial
        identity = _identity(primary, manifest, in_place)
        with partial.sink(identity, tensors) as sink:
            pace, resumed_bytes = Pace(bandwidth_max), sink.bytes_done
            with Receiver(offers, sink, pace, reader, connections, silent_s) as receiver:
                _wait(receiver, sink, watch, deadline_s)
    sink.finish()
    _put_private(flat, manifest)
    flat.load(manifest.plain)
    return _report(primary, manifest, receiver, resumed_bytes, watch.seconds)


class _Watch:
    """Tells how far a heal is, on the calling thread."""

    def __init__(self, progress: Callable[[HealProgress], object] | None) -> None:
        self._progress, self._started = progress, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def tell(self, done: int = 0, total: int = 0) -> None:
        if self._progress is not None:
            now = HealProgress(bytes_done=done, bytes_total=total, seconds=self.seconds)
            self._progress(now)


def _identity(primary: Offer, manifest: Manifest, in_place: bool) -> Identity:
    return Identity(
        state_id=primary.state_id,
        layout_hash=primary.layout_hash,
        part_bytes=manifest.part_bytes,
        in_place=in_place,
    )


def _report(
    primary: Offer, manifest: Manifest, receiver: Receiver, resumed_bytes: int, seconds: float
) -> HealReport:
    size, sources = manifest.layout.nbytes, receiver.sources
    event(
        log,
        "heal.finished",
        step=primary.step,
        bytes=size,
        resumed_bytes=resumed_bytes,
        seconds=seconds,
        by_source={s.offer.address: s.bytes for s in sources},
    )
    return HealReport(
        step=primary.step,
        quorum_id=primary.quorum_id,
        bytes=size,
        seconds=seconds,
        resumed_bytes=resumed_bytes,
        sources=tuple(
            SourceReport(address=s.offer.address, bytes=s.bytes, lost=s.lost) for s in sources
        ),
    )


def _check_offers(offers: Sequence[Offer]) -> None:
    if not offers:
        raise HealFailed("there is no source to heal from")
    if len({(o.step, o.quorum_id, o.layout_hash, o.state_id) for o in offers}) > 1:
        steps = ", ".join(
            f"{o.address}: step {o.step} of quorum {o.quorum_id}, layout {o.layout_hash:016x}"
            for o in offers
        )
        raise HealFailed(f"the sources do not offer the same state ({steps})")


def _prepared(into: object, primary: Offer, manifest: Manifest) -> FlatState:
    """The state to write into, proved to have the same tensors."""
    flat = prepare(into, manifest.layout, manifest.plain)
    names = ("this group", primary.address)
    if difference := first_difference(flat.layout, manifest.layout, names=names):
        raise LayoutDiffers(difference)
    return flat


def _wait(receiver: Receiver, sink: Sink, watch: _Watch, deadline_s: float) -> None:
    """Look after a transfer until it is complete; raise HealFailed when it cannot be."""
    while True:
        finished = receiver.wait(TICK_S)
        sink.copy_completed()
        watch.tell(sink.bytes_done, sink.total)
        if finished:
            return
        why = receiver.why_hopeless()
        if why is None and watch.seconds > deadline_s:
            why = f"the deadline passed after {watch.seconds:.1f} s"
        if why is not None:
            failure = HealFailed(
                f"{sink.bytes_done} of {sink.total} bytes arrived: {why}",
                bytes_done=sink.bytes_done,
                bytes_total=sink.total,
            )
            failure.is_torn = sink.is_written
            raise failure
        receiver.cut_late()


def _put_private(flat: FlatState, manifest: Manifest) -> None:
    offset = 0
    for place in manifest.private_places:
        named = flat.tensors[place]
        copy_in(manifest.private[offset : offset + named.entry.nbytes], named.tensor)
        offset += named.entry.nbytes
