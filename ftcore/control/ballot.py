"""Count what the ranks of one replica group say, until all have said it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Ballot:
    """One answer per rank. `is_complete` when all `ranks` have answered; `reason` is the first no,
    by rank, so that every rank is told the same."""

    ranks: int
    _answers: dict[int, str] = field(default_factory=dict)

    def say(self, rank: int, reason: str = "") -> bool:
        """`reason` is empty for yes. Return whether the ballot is complete now."""
        self._answers.setdefault(rank, reason)
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        return len(self._answers) == self.ranks

    @property
    def missing(self) -> list[int]:
        """Ranks that have not answered yet."""
        return [rank for rank in range(self.ranks) if rank not in self._answers]

    @property
    def reason(self) -> str:
        noes = sorted((rank, why) for rank, why in self._answers.items() if why)
        if not noes:
            return ""
        rank, why = noes[0]
        return why if self.ranks == 1 else f"rank {rank}: {why}"

    def clear(self) -> None:
        self._answers.clear()
