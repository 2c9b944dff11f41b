"""The guards at work on one rank: measure, ask the other groups when that is due, judge."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, Protocol

import torch

from ftcore.base.log import event
from ftcore.digest import state_digest
from ftcore.guards import (
    Finding,
    Guards,
    Judgement,
    NormHistory,
    Objection,
    Seen,
    Word,
    digest_is_due,
    judge,
    must_ask,
)
from ftcore.process_group.base import Group

log = logging.getLogger("ftcore")

_DIGEST_PARTS = 4  # a SHA-256 travels as so many whole numbers of 64 bits
_NS = 1e9


class Reduced(Protocol):
    """What the guards look at: the gradients of a step that was reduced a moment ago."""

    def norm(self) -> float:
        """Of this rank's part of the gradient; the same bits on this rank of every group."""

    def own_is_finite(self) -> bool:
        """Whether what this rank brought to the sum was finite, as far as is known."""

    def compared(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors that are equal in all groups."""


class Watch:
    """Every rank compares itself with the ranks of the same number in the other groups, so it needs
    no collective inside its group: the ballot of the vote unites what its ranks have found."""

    def __init__(self, guards: Guards, group: Group, device: torch.device) -> None:
        self.guards = guards
        self.slowness = 0.0  # how many times slower than the others; 0 where not known
        self.must_leave = ""  # why this group should leave in good order
        self._group, self._device = group, device
        self._history = NormHistory()
        self._norm = 0.0
        self._heals = 0
        self._busy_s: deque[float] = deque(maxlen=guards.straggler_window_steps)
        self._began = 0.0

    # Called around the group's own work

    def work_began(self) -> None:
        self._began = time.perf_counter()

    def work_ended(self, *, shards: int) -> None:
        """Note how long a shard took here. A repeated step may have had none to compute."""
        if self.guards.straggler_factor is None or shards == 0:
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._busy_s.append((time.perf_counter() - self._began) / shards)

    # Called between the reduction and the vote

    def objection(
        self, reduced: Reduced, *, step: int, loss: float, replica_ids: tuple[str, ...]
    ) -> Objection | None:
        """Why the step must not be committed: the same on all groups. Raises GroupError."""
        self._norm = reduced.norm() if self._looks_at_norm() else 0.0
        seen = Seen(step=step, loss=loss, norm=self._norm)
        words: dict[str, Word] = {}
        if must_ask(seen, self._history, self.guards):
            words = self._ask(self._word(reduced, step), replica_ids)
        judgement = judge(seen, words, self._history, self.guards)
        self._history = judgement.history
        me = replica_ids[self._group.rank()]
        self._note_stragglers(judgement, me)
        if judgement.refusal is not None:
            _tell(judgement.refusal, step=step)
        return judgement.refusal

    def _looks_at_norm(self) -> bool:
        return self.guards.finite or self.guards.norm_spike_factor is not None

    def _word(self, reduced: Reduced, step: int) -> Word:
        is_full = len(self._busy_s) == self._busy_s.maxlen
        return Word(
            refusals=self._history.spikes_in_a_row,
            is_finite=reduced.own_is_finite(),
            busy_s=median(self._busy_s) if is_full else 0.0,
            digest=state_digest(reduced.compared()) if digest_is_due(step, self.guards) else "",
        )

    def _ask(self, word: Word, replica_ids: tuple[str, ...]) -> dict[str, Word]:
        """Hear the words of all members, in the order of their replica ranks."""
        mine = _packed(word).to(self._device)
        heard = mine.new_empty(len(replica_ids) * mine.numel())
        self._group._allgather_base(heard, mine).wait()
        self._group.settle()
        rows = heard.cpu().view(len(replica_ids), -1)
        return {name: _unpacked(row) for name, row in zip(replica_ids, rows, strict=True)}

    def _note_stragglers(self, judgement: Judgement, me: str) -> None:
        self.slowness = judgement.slowness.get(me, self.slowness)
        if (found := judgement.straggler) is None:
            return
        event(log, "guard.straggler", why=found.why, replica_ids=list(found.replica_ids))
        if me in found.replica_ids and self.guards.straggler_evict:
            self.must_leave = found.why

    def consequences(self, objection: Objection | None, replica_id: str) -> dict[str, Any]:
        """What to say with the vote. The odd one out heals; it stops when that was so too often,
        and all stop when nobody knows whose state is right."""
        if objection is None:
            return {"slowness": self.slowness}
        is_odd = objection.finding is Finding.DIGEST_DIFFERS and replica_id in objection.replica_ids
        self._heals += is_odd
        is_tie = objection.finding is Finding.DIGEST_TIE
        must_stop = is_tie or self._heals > self.guards.digest_heals_max
        return {
            "is_torn": is_odd,
            "must_stop": must_stop,
            "must_recompute": objection.finding in (Finding.NOT_FINITE, Finding.NORM_SPIKE),
            "slowness": self.slowness,
        }

    def committed(self) -> None:
        self._history = self._history.committed(self._norm, self.guards)

    # State

    def get_state(self) -> object:
        history = self._history
        return {"norms": list(history.norms), "spikes_in_a_row": history.spikes_in_a_row}

    def set_state(self, state: Any) -> None:
        self._history = NormHistory(
            norms=tuple(map(float, state["norms"])), spikes_in_a_row=int(state["spikes_in_a_row"])
        )


def _tell(refusal: Objection, *, step: int) -> None:
    event(
        log,
        "guard.refused",
        step=step,
        finding=refusal.finding.name.lower(),
        why=refusal.why,
        replica_ids=list(refusal.replica_ids),
    )


def _packed(word: Word) -> torch.Tensor:
    digest = bytes.fromhex(word.digest or "0" * 16 * _DIGEST_PARTS)
    parts = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
    head = [word.refusals, int(word.is_finite), round(word.busy_s * _NS)]
    return torch.tensor([*head, *parts], dtype=torch.int64)


def _unpacked(row: torch.Tensor) -> Word:
    refusals, is_finite, busy_ns, *parts = row.tolist()
    digest = b"".join(part.to_bytes(8, "little", signed=True) for part in parts)
    return Word(
        refusals=refusals, is_finite=bool(is_finite), busy_s=busy_ns / _NS, digest=digest.hex()
    )
