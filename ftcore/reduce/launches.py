"""Count the gradients of an armed step and launch its buckets in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftcore.process_group.work import GroupWork
from ftcore.reduce.errors import GradientAfterLaunch


class Launches:
    """Launches a bucket when all its gradients came and all buckets before it are launched: every
    rank must issue its collectives in the same order, whatever order its gradients come in."""

    def __init__(
        self, params: Sequence[int], backwards: int, launch: Callable[[int], GroupWork]
    ) -> None:
        self._left = [count * backwards for count in params]
        self._launch = launch
        self.works: list[GroupWork] = []

    def gradient_came(self, index: int, name: str) -> None:
        if index < len(self.works):
            raise GradientAfterLaunch(f"the gradient of {name} changed after its bucket was sent")
        self._left[index] -= 1
        while len(self.works) < len(self._left) and self._left[len(self.works)] <= 0:
            self._launch_next()

    def launch_all(self) -> None:
        while len(self.works) < len(self._left):
            self._launch_next()

    def _launch_next(self) -> None:
        self.works.append(self._launch(len(self.works)))
