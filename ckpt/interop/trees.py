"""Nested plain values with a TensorRef where a tensor was, and the flat names DCP has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from ckpt.filling import merged_plain
from ckpt.manifest import Manifest
from ftcore.statedict import encode
from ftcore.statedict.plain import TensorRef

Path = tuple[str | int, ...]


def tree_of(manifest: Manifest) -> dict[str, Any]:
    """The state of a step with TensorRefs. A step without plain values is just its tensors."""
    tree = merged_plain(manifest, 0) if manifest.values else None
    if isinstance(tree, dict) and tree:
        return tree
    return {name: TensorRef(name) for name in manifest.tensors}


def with_tensors(tree: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """A copy of the tree with tensors in place of the references."""
    if isinstance(tree, TensorRef):
        return tensor_of(tree.name)
    if isinstance(tree, dict):
        return type(tree)((key, with_tensors(value, tensor_of)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(with_tensors(value, tensor_of) for value in tree)
    return tree


class _Stub(torch.Tensor):  # type: ignore[misc]
    """A tensor without memory that knows its name; DCP flattens it as a tensor."""

    stored_name: str


def flat_names(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """As DCP flattens it: (name → TensorRef or plain value, name → path)."""

    def stub(name: str) -> torch.Tensor:
        made = torch.empty(0).as_subclass(_Stub)
        made.stored_name = name
        return made

    flat, paths = flatten_state_dict(with_tensors(tree, stub))
    leaves = {k: TensorRef(v.stored_name) if isinstance(v, _Stub) else v for k, v in flat.items()}
    return leaves, paths


def plain_values(leaves: Mapping[str, Any], paths: Mapping[str, Path] | None) -> dict[str, str]:
    """Flat leaves as the values of a manifest; `paths` give back the nesting."""
    tree = unflatten_state_dict(dict(leaves), dict(paths)) if paths else dict(leaves)
    return {"0": encode(tree).decode("utf-8", "surrogatepass")}
