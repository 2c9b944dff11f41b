"""Read and write the parts of a state: modules, optimizers, stateful objects, function pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ftcore.statedict.errors import LayoutDiffers, NotAtStepBoundary
from ftcore.statedict.memory import leaves, memory_key


@dataclass(frozen=True, slots=True)
class StatePair:
    """State that lives behind two functions: `get()` returns a tree, `set(tree)` restores it."""

    get: Callable[[], object]
    set: Callable[[Any], object]


class Owner(Protocol):
    """A part of the state that is more than a container."""

    def read(self) -> object:
        """A tree of tensors and plain values; live tensors wherever there are any."""

    def write(self, tree: Any) -> None:
        """Take a tree as `read` gave it, its tensors already filled, its plain values new."""


def owner_of(value: object, names: Mapping[int, str]) -> Owner | None:
    """The reader and writer of `value`, or None for a tensor, container or plain value.

    `names` gives the names of parameters by id, so that the state of an optimizer is called
    after its parameters.
    """
    if isinstance(value, Tensor):
        return None
    if isinstance(value, StatePair):
        return PairOwner(value)
    if isinstance(value, nn.Module):
        return ModuleOwner(unwrapped(value))
    if isinstance(value, torch.optim.Optimizer) and has_plain_state(value):
        return OptimizerOwner(value, names)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StatefulOwner(value)
    return None


def has_plain_state(optimizer: torch.optim.Optimizer) -> bool:
    """False for a class with a `state_dict` of its own: only it knows what its state is."""
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and DistributedDataParallel, without their prefixes."""
    while True:
        if "_orig_mod" in module._modules:
            module = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


class PairOwner:
    """A registered `(get, set)` pair."""

    def __init__(self, pair: StatePair) -> None:
        self._pair = pair

    def read(self) -> object:
        return self._pair.get()

    def write(self, tree: Any) -> None:
        self._pair.set(tree)


class StatefulOwner:
    """Anything with `state_dict` and `load_state_dict`: schedulers, loaders, samplers, wrappers."""

    def __init__(self, stateful: Any) -> None:
        self._stateful = stateful

    def read(self) -> object:
        return self._stateful.state_dict()

    def write(self, tree: Any) -> None:
        self._stateful.load_state_dict(tree)


class ModuleOwner:
    """A module: parameters and buffers written in place, hooks that hand out copies obeyed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tree: dict[str, object] = {}

    def read(self) -> object:
        assert_idle(self._module)
        self._tree = dict(self._module.state_dict())
        return self._tree

    def write(self, tree: Any) -> None:
        if not self._is_all_live():
            self._module.load_state_dict(tree)

    def _is_all_live(self) -> bool:
        """True when all values of the state dict are memory of the module: nothing is left."""
        live = set()
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            live |= {memory_key(leaf.tensor) for leaf in leaves(tensor, path="")}
        return all(
            isinstance(value, Tensor)
            and all(
                leaf.tensor.numel() == 0 or memory_key(leaf.tensor) in live
                for leaf in leaves(value, path=name)
            )
            for name, value in self._tree.items()
        )


def assert_idle(module: nn.Module) -> None:
    """Refuse a module in mid-step: `state_dict()` of FSDP2 reshards parameters that are in use."""
    for name, part in module.named_modules():
        get_state = getattr(part, "_get_fsdp_state", None)
        if get_state is None:
            continue
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for holder in (state, *groups):
            moment = getattr(holder, "_training_state", None)
            if moment is not None and moment.name != "IDLE":
                raise NotAtStepBoundary(
                    f"the state was exported while {name or 'the model'} was in {moment.name}"
                )


class OptimizerOwner:
    """A torch optimizer, by its live state: `Optimizer.load_state_dict` would replace every tensor,
    and a compiled step would be compiled again."""

    lazy_key = "state"

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.names = parameter_names(optimizer, names)
        self.parameters = {name: parameter for parameter, name in self.names.items()}

    def read(self) -> object:
        groups = [
            {**group, "params": [self.names[p] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        state = {
            self.names.get(key, key): dict(values) if isinstance(values, dict) else values
            for key, values in self.optimizer.state.items()
        }
        order = {name: i for i, name in enumerate(self.parameters)}
        in_order = sorted(state.items(), key=lambda item: order.get(item[0], len(order)))
        return {"state": dict(in_order), "param_groups": groups}

    def write(self, tree: Any) -> None:
        groups = self.optimizer.param_groups
        _check_optimizer_tree(tree, [[self.names[p] for p in group["params"]] for group in groups])
        for group, received in zip(groups, tree["param_groups"], strict=True):
            _replace(group, received, keep={"params"})
        state = self.optimizer.state
        received_state = {self.parameters.get(name, name): v for name, v in tree["state"].items()}
        for key in [key for key in state if key not in received_state]:
            del state[key]
        for key, values in received_state.items():
            if isinstance(values, dict):
                _replace(state[key], values)
            else:
                state[key] = values


def _check_optimizer_tree(tree: Any, names: list[list[str]]) -> None:
    try:
        same = [group["params"] for group in tree["param_groups"]] == names
        same = same and isinstance(tree["state"], dict)
    except (TypeError, KeyError):
        same = False
    if not same:
        raise LayoutDiffers("the optimizer has other parameter groups than the received state")


def _replace(
    live: Any, received: Mapping[str, object], keep: frozenset[str] | set[str] = frozenset()
) -> None:
    """Make `live` equal to `received` without touching what is already the same object."""
    for key in [key for key in live if key not in received and key not in keep]:
        del live[key]
    for key, value in received.items():
        if key not in keep and live.get(key, live) is not value:
            live[key] = value


def parameter_names(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[Tensor, str]:
    """A name for each parameter of an optimizer: that of its module, or else its number."""
    result: dict[Tensor, str] = {}
    taken: set[str] = set()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        name = names.get(id(parameter), str(number))
        result[parameter] = name if name not in taken else f"{name}~{number}"
        taken.add(result[parameter])
    return result
