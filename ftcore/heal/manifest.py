"""Say what a snapshot holds: layout, plain values, and the bytes that do not travel in parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftcore.heal.errors import FrameInvalid
from ftcore.statedict import FlatState, Layout, NamedTensor
from ftcore.statedict.memory import copy_out

BLOCKS = 4  # head, layout, plain values, private bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a reader learns before it asks for parts.

    `moving` are the places in the layout of the tensors that travel in parts of `part_bytes`;
    `private` holds the bytes of all others, one after the other, from this one source, since
    buffers and generators may differ between groups and must not be mixed.
    """

    layout: Layout
    plain: bytes
    moving: tuple[int, ...]
    part_bytes: int
    private: Tensor

    @property
    def private_places(self) -> list[int]:
        moving = set(self.moving)
        entries = enumerate(self.layout.entries)
        return [i for i, e in entries if e.alias_of is None and i not in moving]


def encode_manifest(
    flat: FlatState, moving: Sequence[NamedTensor], private: Sequence[NamedTensor], part_bytes: int
) -> tuple[bytes, ...]:
    """The four blocks of a manifest. Copies the private tensors."""
    places = {id(named): i for i, named in enumerate(flat.tensors)}
    head = {"moving": [places[id(t)] for t in moving], "part_bytes": part_bytes}
    raw = torch.empty(sum(t.entry.nbytes for t in private), dtype=torch.uint8)
    offset = 0
    for named in private:
        copy_out(named.tensor, raw[offset : offset + named.entry.nbytes])
        offset += named.entry.nbytes
    return json.dumps(head).encode(), flat.layout.to_bytes(), flat.plain, raw.numpy().tobytes()


def decode_manifest(blocks: Sequence[bytearray]) -> Manifest:
    """The inverse of `encode_manifest`; raises an FtError for blocks that do not fit together."""
    head, layout_bytes, plain, private = blocks
    layout = Layout.from_bytes(bytes(layout_bytes))
    try:
        document = json.loads(head)
        moving, part_bytes = document["moving"], document["part_bytes"]
        if type(part_bytes) is not int or part_bytes < 1:
            raise ValueError(f"parts of {part_bytes!r:.40} bytes")
        own = [i for i, e in enumerate(layout.entries) if e.alias_of is None]
        if moving != sorted(set(moving)) or not set(moving) <= set(own):
            raise ValueError("the list of moving tensors does not fit the layout")
    except (ValueError, TypeError, KeyError) as error:
        raise FrameInvalid(f"a manifest cannot be read: {error}") from error
    raw = torch.frombuffer(private, dtype=torch.uint8) if private else torch.empty(0).byte()
    manifest = Manifest(
        layout=layout,
        plain=bytes(plain),
        moving=tuple(moving),
        part_bytes=part_bytes,
        private=raw,
    )
    if sum(layout.entries[i].nbytes for i in manifest.private_places) != len(private):
        raise FrameInvalid("a manifest has more or fewer private bytes than its layout says")
    return manifest
