"""Unpickle the `.metadata` of a stock DCP checkpoint, and nothing but its own dataclasses.

The stock reader calls `pickle.load` there, which runs whatever a file asks for.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.interop.errors import ForeignFormat

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
ALLOWED = {
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "TensorProperties"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    (METADATA, "StorageMeta"),
    (FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def _joined(*parts: str) -> str:
    """Where the checkpoint once lay: of no use but text."""
    return "/".join(map(str, parts))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.startswith("pathlib") and name in PATHS:
            return _joined
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ForeignFormat(f"its metadata wants {module}.{name}, which is never loaded")

    def persistent_load(self, _: Any) -> Any:
        raise ForeignFormat("its metadata refers to other objects, which DCP never does")


def read_metadata(data: bytes, *, where: str) -> Metadata:
    """The metadata of a checkpoint. Raises ForeignFormat for anything else."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except ForeignFormat as error:
        raise ForeignFormat(f"{where}: {error}", where=where) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ForeignFormat(f"{where} cannot be read: {error}", where=where) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ForeignFormat(f"{where} holds no metadata of a checkpoint", where=where)
    return metadata
