"""Give a fresh state what a trained one has: optimizer state that the first step creates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftcore.statedict import plain
from ftcore.statedict.entries import Entry, Layout
from ftcore.statedict.flat import FlatState, flatten
from ftcore.statedict.memory import leaves
from ftcore.statedict.owners import OptimizerOwner
from ftcore.statedict.plain import TensorRef, dtype_of
from ftcore.statedict.siblings import examples, is_sibling, sibling_of

BATCH_BYTES = 64 << 20  # of parameters that are copied and have a gradient at one moment


def prepare(state: object, layout: Layout, plain_values: bytes) -> FlatState:
    """Make the optimizers in `state` hold the same tensors as the state that `layout` and
    `plain_values` describe, and return `state` flattened.

    Missing state is created by the optimizer itself, so that its classes, devices and dtypes are
    right: by a step with zero gradients on one small parameter of each kind, which is restored bit
    by bit afterwards. The others get state like it. Those whose state is not like it are stepped
    themselves, and what the optimizer cannot create so is made from the layout. State that the
    other side has not is dropped. Parameters, gradients, random generators and hooks are left as
    they were. Whether the layouts are equal now is for the caller to compare.
    """
    flat = flatten(state)
    if flat.layout.hash == layout.hash:
        return flat
    wanted = plain.decode(plain_values)
    maker = _Maker({entry.name: entry for entry in layout.entries}, dict(flat.by_name))
    for keys, owner in flat.optimizers():
        tree = _at(wanted, keys)
        if isinstance(tree, dict) and isinstance(tree.get("state"), dict):
            _match_state(owner, tree["state"], maker)
    return flatten(state)


def _at(tree: Any, keys: Sequence[object]) -> Any:
    for key in keys:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def _match_state(owner: OptimizerOwner, wanted: dict[Any, Any], maker: _Maker) -> None:
    state = owner.optimizer.state
    keys = {owner.parameters.get(name, name): tree for name, tree in wanted.items()}
    for key in [key for key in state if key not in keys or not _same_kind(state[key], keys[key])]:
        del state[key]
    missing = [p for p in owner.names if p in keys and p not in state]
    example_of = examples(owner.optimizer, missing)
    _try_create(owner.optimizer, list({id(p): p for p in example_of.values()}.values()))
    for parameter in missing:
        example, wanted = example_of[id(parameter)], keys[parameter]
        made = state.get(example)
        if parameter not in state and is_sibling(made, example, wanted, parameter, maker.entries):
            state[parameter] = sibling_of(made, example, parameter)
    _try_create(owner.optimizer, [p for p in missing if p not in state])
    for parameter in missing:
        if not _same_kind(state.get(parameter), keys[parameter]):
            state[parameter] = maker.make(keys[parameter], parameter)


def _try_create(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """A rule that needs a closure or a real gradient cannot; its state is made from the layout."""
    if parameters:
        with suppress(TypeError, RuntimeError, NotImplementedError):
            create_state(optimizer, parameters)


def _same_kind(live: Any, wanted: Any) -> bool:
    """True when tensors stand at the same keys. Plain values are written later."""
    if isinstance(live, Tensor) or isinstance(wanted, TensorRef):
        return isinstance(live, Tensor) and isinstance(wanted, TensorRef)
    if isinstance(live, dict) and isinstance(wanted, dict):
        return live.keys() == wanted.keys() and all(_same_kind(live[k], wanted[k]) for k in live)
    if isinstance(live, list | tuple) and isinstance(wanted, list | tuple):
        return len(live) == len(wanted) and all(map(_same_kind, live, wanted))
    return not any(isinstance(side, dict | list | tuple) for side in (live, wanted))


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes state of zeros from a layout, with the ties that the layout has."""

    entries: dict[str, Entry]
    known: dict[str, Tensor]

    def make(self, wanted: Any, parameter: Tensor) -> Any:
        if isinstance(wanted, TensorRef) and wanted.name in self.entries:
            return self._tensor(self.entries[wanted.name], parameter)
        if isinstance(wanted, dict):
            return {key: self.make(value, parameter) for key, value in wanted.items()}
        if isinstance(wanted, list | tuple):
            return type(wanted)(self.make(value, parameter) for value in wanted)
        return wanted

    def _tensor(self, entry: Entry, parameter: Tensor) -> Tensor:
        if entry.alias_of in self.known:
            return self.known[entry.alias_of]
        dtype = dtype_of(entry.dtype)
        if entry.global_shape == tuple(parameter.shape):
            made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = parameter.device if entry.shape else torch.device("cpu")  # 0-d: a counter
            made = torch.zeros(entry.shape, dtype=dtype, device=device)
        return self.known.setdefault(entry.name, made)


def create_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Let `optimizer` create its state for `parameters` and for no others, changing nothing else.

    Only parameters with a gradient are stepped by any torch optimizer, so each batch gets zero
    gradients and the others none. The idea of a first step with zero gradients is that of
    torch.distributed.checkpoint.state_dict; restoring the bits makes it exact for every rule.
    """
    step = _bare_step(optimizer)
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with (
        _gradients_set_aside(optimizer),
        _plain_options_restored(optimizer),
        torch.random.fork_rng(devices=devices),
    ):
        for batch in _batches(parameters):
            saved = [leaf.tensor.clone() for p in batch for leaf in leaves(p, path="")]
            try:
                for parameter in batch:
                    parameter.grad = torch.zeros_like(parameter)
                step(optimizer)
            finally:
                _restore(batch, saved)


def _bare_step(optimizer: torch.optim.Optimizer) -> Any:
    """The step of the class without its hooks: a hook may commit, log or reduce."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _restore(batch: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    live = [leaf.tensor for p in batch for leaf in leaves(p, path="")]
    with torch.no_grad():
        for leaf, old in zip(live, saved, strict=True):
            leaf.copy_(old)
    for parameter in batch:
        parameter.grad = None


@contextmanager
def _gradients_set_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _plain_options_restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    saved = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, saved, strict=True):
            group.update(old)


def _batches(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    size = 0
    for parameter in parameters:
        batch.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
