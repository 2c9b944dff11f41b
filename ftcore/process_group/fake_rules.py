"""What each collective does, as functions of the arguments that all ranks gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

Arguments = tuple[Any, ...]
Calls = Sequence[Arguments]


def _reduced(tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    stacked = torch.stack([t.detach() for t in tensors])
    if op == ReduceOp.SUM:
        return stacked.sum(0)
    if op == ReduceOp.AVG:
        return stacked.mean(0)
    if op == ReduceOp.MAX:
        return stacked.max(0).values
    if op == ReduceOp.MIN:
        return stacked.min(0).values
    return stacked.prod(0)


def _allreduce(calls: Calls) -> None:
    for tensors in zip(*(call[0] for call in calls), strict=True):
        total = _reduced(tensors, calls[0][1].reduceOp)
        for tensor in tensors:
            tensor.copy_(total)


def _broadcast(calls: Calls) -> None:
    source = calls[calls[0][1].rootRank][0]
    for call in calls:
        for tensor, value in zip(call[0], source, strict=True):
            tensor.copy_(value)


def _reduce(calls: Calls) -> None:
    options = calls[0][1]
    total = _reduced([call[0][0] for call in calls], options.reduceOp)
    calls[options.rootRank][0][0].copy_(total)


def _allgather(calls: Calls) -> None:
    for outputs, *_ in calls:
        for output, call in zip(outputs[0], calls, strict=True):
            output.copy_(call[1][0])


def _gather(calls: Calls) -> None:
    root = calls[0][2].rootRank
    for output, call in zip(calls[root][0][0], calls, strict=True):
        output.copy_(call[1][0])


def _scatter(calls: Calls) -> None:
    inputs = calls[calls[0][2].rootRank][1][0]
    for call, tensor in zip(calls, inputs, strict=True):
        call[0][0].copy_(tensor)


def _allgather_base(calls: Calls) -> None:
    whole = torch.cat([call[1].reshape(-1) for call in calls])
    for output, *_ in calls:
        output.view(-1).copy_(whole)


def _reduce_scatter(calls: Calls) -> None:
    for rank, (outputs, _, options) in enumerate(calls):
        outputs[0].copy_(_reduced([call[1][0][rank] for call in calls], options.reduceOp))


def _reduce_scatter_base(calls: Calls) -> None:
    total = _reduced([call[1].reshape(-1) for call in calls], calls[0][2].reduceOp)
    for (output, *_), part in zip(calls, total.chunk(len(calls)), strict=True):
        output.view(-1).copy_(part)


def _alltoall_base(calls: Calls) -> None:
    def parts(tensor: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        split: Sequence[torch.Tensor] = tensor.split(sizes) if sizes else tensor.chunk(len(calls))
        return split

    sent = [parts(call[1], call[3]) for call in calls]
    for rank, (output, _, sizes, *_) in enumerate(calls):
        for part, source in zip(parts(output, sizes), sent, strict=True):
            part.copy_(source[rank])


def _barrier(calls: Calls) -> None:
    return


def deliver(calls: Calls) -> None:
    for source, target in zip(calls[0][0], calls[1][0], strict=True):
        target.copy_(source)


RULES: dict[str, Callable[[Calls], None]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "_allgather_base": _allgather_base,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "alltoall_base": _alltoall_base,
    "barrier": _barrier,
}


def output_tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for t in output if isinstance(t, torch.Tensor)] if isinstance(output, list) else []
