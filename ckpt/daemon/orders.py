"""What trainers ask of the daemon, as they say it in messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One place where steps go. A private one is seen by this host only (a local disk)."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    private: bool = False
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects, and which of the participants of a session it is. `run` names the memory tier:
    the same for all lives of one training run. `seat` is whose staging memory this is: a trainer
    that comes back finds there what its last life left."""

    run: str
    seat: str
    session: str
    index: int
    count: int
    pid: int
    destinations: tuple[Destination, ...]
    retention: Mapping[str, Any] = field(default_factory=dict)
    participants_timeout_s: float = 60.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Hello:
        destinations = tuple(Destination(**d) for d in content["destinations"])
        rest = {k: v for k, v in content.items() if k != "destinations"}
        return cls(**(rest | {"destinations": destinations}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One save of one participant. `copies` says, for each class of replicated tensors, which copy
    this participant holds: it writes the files of that owner. Participants whose index is equal
    modulo `ranks` hold the same."""

    save_id: int
    step: int
    attempt: str
    index: int
    count: int
    ranks: int
    slot: int
    layout: str
    created_unix_s: float
    copies: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    durable_at: tuple[str, ...] = ()  # destinations that a daemon before this one has finished
    resident: bool = True  # the slot holds the whole step, not a wave of it

    @property
    def session(self) -> str:
        return self.attempt.rpartition(".")[0]

    def replicas_of(self, index: int) -> range:
        """Those who hold what participant `index` holds, itself among them."""
        return range(index % self.ranks, self.count, self.ranks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Order:
        return cls(**(dict(content) | {"durable_at": tuple(content["durable_at"])}))
