"""Give a backend of ours a name in the flight recorder, so that its calls can be told apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ftcore.names import CREW


def name_in_records(backend: Any, device_type: str, name: str) -> None:
    """Let the recorder write `name` and CREW with each call of `backend`.

    Only a ProcessGroup can name its backends, so one is made for it and dropped again.
    """
    kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
    namer = dist.ProcessGroup(dist.HashStore(), 0, 1)
    namer._register_backend(torch.device(device_type), kinds[device_type], backend)
    namer._set_group_name(name)
    namer._set_group_desc(CREW)
