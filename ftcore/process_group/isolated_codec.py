"""The calls of a group as JSON: tensors by their place in shared memory, options by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

OPTIONS = {
    name: getattr(c10d, name)
    for name in (
        "AllreduceOptions",
        "AllreduceCoalescedOptions",
        "BroadcastOptions",
        "ReduceOptions",
        "AllgatherOptions",
        "ReduceScatterOptions",
        "AllToAllOptions",
        "GatherOptions",
        "ScatterOptions",
        "BarrierOptions",
    )
}
OPERATIONS = frozenset(
    {"allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base"}
    | {"reduce_scatter", "_reduce_scatter_base", "alltoall_base", "gather", "scatter"}
    | {"send", "recv", "barrier"}
)
REDUCTIONS = {
    op: getattr(ReduceOp, op) for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR")
}
# Their first argument is read as well as written, or only read; all others only write it.
READS_FIRST = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce", "send"})
WRITES_NOTHING = frozenset({"send", "barrier"})


def encode(value: Any, place: Callable[[torch.Tensor], list[Any]]) -> Any:
    """`place` puts a tensor into shared memory and says where."""
    if isinstance(value, torch.Tensor):
        return {"tensor": place(value)}
    if isinstance(value, list | tuple):
        return [encode(item, place) for item in value]
    name = type(value).__name__
    if name not in OPTIONS:
        return int(value)
    found: dict[str, Any] = {"options": name}
    if hasattr(value, "reduceOp"):
        found["reduce"] = _reduction(value.reduceOp)
    if hasattr(value, "rootRank"):
        found["root"] = value.rootRank
    return found


def decode(value: Any, tensor_at: Callable[[list[Any]], torch.Tensor]) -> Any:
    """Turn JSON back into arguments. Only known names make anything."""
    if isinstance(value, list):
        return [decode(item, tensor_at) for item in value]
    if not isinstance(value, dict):
        return int(value)
    if "tensor" in value:
        return tensor_at(value["tensor"])
    options = OPTIONS[value["options"]]()
    if "reduce" in value:
        options.reduceOp = REDUCTIONS[value["reduce"]]
    if "root" in value:
        options.rootRank = int(value["root"])
    return options


def _reduction(op: Any) -> str:
    return next(name for name, value in REDUCTIONS.items() if op == value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype
