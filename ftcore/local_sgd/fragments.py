"""Decide which parameters are synchronized when: fragments of equal size, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftcore.base.errors import BadSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When the inner steps end in an outer step.

    sync_every: inner steps between two outer steps of the same fragment (H).
    fragments: outer steps rotate through so many parts of the model (streaming).
    delay: the reduction starts so many inner steps before its result is used, and overlaps them.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1 or self.fragments < 1 or self.delay < 0:
            raise BadSetting(f"{self} has a number that is too small")
        if self.sync_every % self.fragments:
            raise BadSetting(
                f"sync_every {self.sync_every} is not a multiple of fragments {self.fragments}",
                remedy="Choose them so that each outer step follows equally many inner steps.",
            )
        if self.delay >= self.inner_steps:
            raise BadSetting(
                f"delay {self.delay} does not fit between outer steps {self.inner_steps} apart",
                remedy="Lower delay, raise sync_every or use fewer fragments.",
            )

    @property
    def inner_steps(self) -> int:
        """Inner steps from one outer step to the next one, of whichever fragment."""
        return self.sync_every // self.fragments

    def fragment_of(self, outer_step: int) -> int:
        return outer_step % self.fragments


def split_evenly(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cut the indices of `sizes` into `parts` runs of about equal sums, none of them empty."""
    if len(sizes) < parts:
        raise BadSetting(
            f"{parts} fragments were asked for, but the model has {len(sizes)} parameters",
            remedy="Ask for fewer fragments.",
        )
    runs: list[list[int]] = [[] for _ in range(parts)]
    total, done, part = sum(sizes), 0, 0
    for index, size in enumerate(sizes):
        left = len(sizes) - index
        if runs[part] and part + 1 < parts:
            is_full = (done + size / 2) * parts > total * (part + 1)
            if is_full or left <= parts - part - 1:
                part += 1
        runs[part].append(index)
        done += size
    return runs
