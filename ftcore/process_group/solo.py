"""A world of one: every collective is a copy, or nothing. No store, no network, no threads."""

from __future__ import annotations

from typing import Any

import torch

from ftcore.process_group.errors import GroupMisused


class SoloWork:
    """A collective that has ended already."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class SoloBackend:
    """Takes torch's arguments. A sum over one member leaves its tensors as they are."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> SoloWork:
        return SoloWork(list(tensors))

    allreduce_coalesced = broadcast = reduce = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> SoloWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            output[0].copy_(tensor)
        return SoloWork([output[0] for output in outputs])

    gather = allgather

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> SoloWork:
        for output, tensors in zip(outputs, inputs, strict=True):
            output.copy_(tensors[0])
        return SoloWork(list(outputs))

    scatter = reduce_scatter

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> SoloWork:
        output.view(-1).copy_(input.reshape(-1))
        return SoloWork([output])

    _reduce_scatter_base = _allgather_base

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        o: Any,
    ) -> SoloWork:
        return self._allgather_base(output, input, o)

    def barrier(self, opts: Any) -> SoloWork:
        return SoloWork([])

    def send(self, tensors: Any, rank: int, tag: int) -> SoloWork:
        raise GroupMisused(f"send to or receive from rank {rank} in a world of one")

    recv = send


class SoloLink:
    """Nothing to cut: nobody ever waits."""

    backend: object = SoloBackend()

    def cut(self) -> None:
        return
