"""Write the golden step of format 1: `python -m tests.ckpt.make_golden DIRECTORY`."""

import sys
from pathlib import Path

import torch

from ckpt.assemble import Part, Whole, assemble
from ckpt.boxes import Box
from ckpt.hashing import chunk_digests, content_name
from ckpt.manifest import File, Manifest
from ckpt.plan import Item, plan

TENSORS = {
    "model.weight": torch.arange(40_000, dtype=torch.float32).reshape(200, 200) / 8,
    "model.bias": torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "z": torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128),
}


def items():
    for name, tensor in TENSORS.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        yield Item(name, dtype, tuple(tensor.shape), box)


def images(layout):
    """The files of a layout, made without the stager: an independent writer of the format."""
    for file in layout.files:
        image = bytearray(file.size)
        image[: file.data_start] = file.header
        for member in file.members:
            raw = TENSORS[member.item.name].contiguous().reshape(-1).view(torch.uint8)
            image[member.offset : member.offset + member.item.nbytes] = raw.numpy().tobytes()
        yield bytes(image)


def golden():
    """All files of the golden step by key."""
    layout = plan(list(items()), aliases=[("tied", "model.weight")])
    files, named = {}, {}
    for number, image in enumerate(images(layout)):
        digests = chunk_digests(memoryview(image))
        key = f"0badcafe.1-00000-{number:04d}-{content_name(digests)}.safetensors"
        files[number] = File(key, len(image), digests)
        named[key] = image
    part = Part(index=0, layout=layout, files=files)
    whole = assemble({0: part}, count=1, dead={})
    assert isinstance(whole, Whole)
    manifest = Manifest(
        step=7,
        attempt="0badcafe.1",
        epoch=1,
        created_unix_s=1764547200.0,
        files=whole.files,
        tensors=whole.tensors,
        values={"0": '["ftplain",1,{"dict":[["epoch",3]]}]'},
        metrics={"loss": 0.5},
    )
    return {**named, "manifest.ckpt": manifest.to_bytes()}


if __name__ == "__main__":
    directory = Path(sys.argv[1]) / "step-0000000007"
    directory.mkdir(parents=True)
    for key, data in golden().items():
        (directory / key).write_bytes(data)
