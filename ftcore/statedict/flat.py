"""Flatten a live state into named tensors and plain values, and put received values back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from ftcore.statedict import plain
from ftcore.statedict.entries import Entry, Layout
from ftcore.statedict.errors import CannotStore, LayoutDiffers
from ftcore.statedict.memory import MemoryKey, leaves, memory_key
from ftcore.statedict.owners import OptimizerOwner, Owner, owner_of, unwrapped
from ftcore.statedict.plain import DEPTH_MAX, TensorRef

Keys: TypeAlias = tuple[object, ...]  # the way from the root of a state to a part of it


class NamedTensor(NamedTuple):
    """A live local tensor (no copy, detached) and what is known about it."""

    entry: Entry
    tensor: Tensor
    is_parameter: bool  # of a module: changed by optimizer steps only

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True, kw_only=True)
class FlatState:
    """A state at one step boundary: `tensors` to move, `plain` to store, `load` to put back.

    Fill the tensors in place, then call `load` with the plain bytes of the state they came from.
    """

    tensors: tuple[NamedTensor, ...]
    plain: bytes
    _root: object
    _owners: dict[Keys, Owner]
    tree: object  # containers and plain values, with references where tensors are
    by_name: dict[str, Tensor]  # as they stand in the state: subclasses whole

    @cached_property
    def layout(self) -> Layout:
        return Layout(tuple(named.entry for named in self.tensors))

    def load(self, plain_values: bytes) -> None:
        """Put `plain_values` into the live objects; the tensors must be filled by now."""
        received = plain.decode(plain_values)
        result = _Loader(self._owners, self.by_name).put(self._root, received, ())
        if result is not self._root:
            raise LayoutDiffers("the state is not a container that can be filled in place")

    @property
    def owners(self) -> Mapping[Keys, Owner]:
        """The parts of the state that are more than containers, by place, in order."""
        return self._owners

    def optimizers(self) -> list[tuple[Keys, OptimizerOwner]]:
        """The optimizers whose state is known by parameter, with their places in the state."""
        return [(k, o) for k, o in self._owners.items() if isinstance(o, OptimizerOwner)]


def flatten(state: object) -> FlatState:
    """Flatten a live state: modules, optimizers, objects with `state_dict` and `load_state_dict`,
    `StatePair`s, tensors, plain values, and containers of all these.

    Call it on the training thread at a step boundary: `state_dict()` of FSDP2 reshards parameters,
    which kills a step that runs. Raises CannotStore with the path of what cannot be stored, and
    NotAtStepBoundary when FSDP2 is in mid-step.
    """
    names, parameters = _parameters(state)
    walk = _Walk(names, parameters)
    tree = walk.node(state, (), lazy=False)
    return FlatState(
        tensors=tuple(walk.tensors),
        plain=plain.encode(tree),
        _root=state,
        _owners=walk.owners,
        tree=tree,
        by_name=walk.by_name,
    )


def layout(state: object) -> Layout:
    """The layout of a live state. Groups compare `layout(state).static.hash` at a quorum."""
    return flatten(state).layout


class _Walk:
    """One pass over a state: collects tensors and owners, returns the tree with references."""

    def __init__(self, names: dict[int, str], parameters: set[MemoryKey]) -> None:
        self.tensors: list[NamedTensor] = []
        self.owners: dict[Keys, Owner] = {}
        self.by_name: dict[str, Tensor] = {}
        self._names = names
        self._parameters = parameters
        self._taken: set[str] = set()
        self._first_with: dict[MemoryKey, str] = {}

    def node(self, value: object, keys: Keys, *, lazy: bool) -> object:
        if len(keys) > DEPTH_MAX:
            path = _path(keys)[:80]
            raise CannotStore(f"{path} is nested deeper than {DEPTH_MAX} levels, or in itself")
        if isinstance(value, Tensor):
            return self._tensor(value, _path(keys), lazy)
        owner = owner_of(value, self._names)
        if owner is not None:
            return self._owned(owner, keys)
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            pairs = ((k, self.node(v, (*keys, k), lazy=lazy)) for k, v in value.items())
            return type(value)(pairs)
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self.node(v, (*keys, i), lazy=lazy) for i, v in enumerate(value))
        return value

    def _owned(self, owner: Owner, keys: Keys) -> object:
        self.owners[keys] = owner
        tree = owner.read()
        if not isinstance(owner, OptimizerOwner):
            return self.node(tree, keys, lazy=False)
        assert isinstance(tree, dict)
        return {
            key: self.node(part, (*keys, key), lazy=key == owner.lazy_key)
            for key, part in tree.items()
        }

    def _tensor(self, tensor: Tensor, path: str, lazy: bool) -> TensorRef:
        name = self._unique(path)
        self.by_name[name] = tensor
        for leaf in leaves(tensor, path=path):
            full = self._unique(name + leaf.suffix) if leaf.suffix else name
            key = memory_key(leaf.tensor)
            first = self._first_with.setdefault(key, full) if leaf.tensor.numel() else full
            dtype, alias_of = leaf.tensor.dtype, first if first != full else None
            place = (leaf.global_shape, leaf.box)
            entry = Entry(full, plain.dtype_name(dtype), *place, dtype.itemsize, alias_of, lazy)
            self.tensors.append(NamedTensor(entry, leaf.tensor, key in self._parameters))
        return TensorRef(name)

    def _unique(self, name: str) -> str:
        """`name`, or `name~2` when {"a.b": x, "a": {"b": y}} made it twice."""
        candidate, count = name, 1
        while candidate in self._taken:
            count += 1
            candidate = f"{name}~{count}"
        self._taken.add(candidate)
        return candidate


@dataclass(frozen=True, slots=True)
class _Loader:
    """One pass over a live state and a received tree of the same shape."""

    owners: dict[Keys, Owner]
    by_name: dict[str, Tensor]

    def put(self, live: object, received: object, keys: Keys) -> object:
        """Write `received` into `live`; return what its container should hold now."""
        if keys in self.owners:
            self.owners[keys].write(self.resolve(received))
            return live
        if isinstance(live, dict) and isinstance(received, dict):
            return self._put_dict(live, received, keys)
        if isinstance(live, list) and isinstance(received, list):
            old = live + [None] * (len(received) - len(live))
            live[:] = [self.put(old[i], v, (*keys, i)) for i, v in enumerate(received)]
            return live
        if isinstance(live, tuple) and isinstance(received, tuple) and len(live) == len(received):
            new = tuple(self.put(live[i], v, (*keys, i)) for i, v in enumerate(received))
            return live if all(a is b for a, b in zip(live, new, strict=True)) else new
        return self.resolve(received)

    def _put_dict(self, live: dict[Any, Any], received: dict[Any, Any], keys: Keys) -> object:
        for key in [key for key in live if key not in received]:
            del live[key]
        for key, value in received.items():
            new = self.put(live.get(key), value, (*keys, key))
            if key not in live or new is not live[key]:
                live[key] = new
        return live

    def resolve(self, received: Any) -> Any:
        """The received tree with live tensors in place of references."""
        if isinstance(received, TensorRef):
            if received.name not in self.by_name:
                raise LayoutDiffers(f"the received state has {received.name}, this one has not")
            return self.by_name[received.name]
        if type(received) in (dict, OrderedDict):
            return type(received)((key, self.resolve(value)) for key, value in received.items())
        if type(received) in (list, tuple):
            return type(received)(self.resolve(value) for value in received)
        return received


def _path(keys: Keys) -> str:
    """The dotted name of a place. What `torch.compile` puts into names is left out."""
    return ".".join(map(str, keys)).replace("_orig_mod.", "")


def _parameters(state: object) -> tuple[dict[int, str], set[MemoryKey]]:
    """Names of the parameters of all modules in a tree, by id (the first one if tied), and where
    these parameters lie."""
    names: dict[int, str] = {}
    places: set[MemoryKey] = set()
    for module in _modules(state, 0):
        for name, parameter in unwrapped(module).named_parameters():
            names.setdefault(id(parameter), name.replace("_orig_mod.", ""))
            places |= {memory_key(leaf.tensor) for leaf in leaves(parameter, path=name)}
    return names, places


def _modules(value: object, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict | list | tuple) and depth <= DEPTH_MAX:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _modules(part, depth + 1)
