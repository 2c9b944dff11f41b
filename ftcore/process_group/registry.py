"""Make a group known to torch by name: functional collectives and DeviceMesh find it then."""

from __future__ import annotations

from itertools import count

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ftcore.process_group.base import Group

_numbers = count()


def register(group: Group, *, name: str | None = None) -> str:
    """Give the group a name that torch resolves, and return it. It stays valid over quorums.

    To torch the group is one more group of this process's own rank: the other replica groups are
    no members of this process's world.
    """
    if name is None:
        name = f"ftcore-{next(_numbers)}"
    group.group_name = name
    _register_process_group(name, group)
    world = c10d._world
    world.pg_map[group] = (group.backend_name, None)
    world.pg_names[group] = name
    world.pg_backend_config[group] = group.backend_name
    world.pg_group_ranks[group] = {dist.get_rank() if dist.is_initialized() else 0: 0}
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    return name


def unregister(group: Group) -> None:
    """Take the name away again."""
    world = c10d._world
    if tag := world.pg_to_tag.pop(group, ""):
        world.tags_to_pg[tag].remove(group)
        _unregister_process_group(group.group_name)
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_group_ranks):
        table.pop(group, None)


def replicate_mesh(group: Group, inner: DeviceMesh, *, name: str = "replicate") -> DeviceMesh:
    """Return `inner` with a first dimension `name` that is `group`, for hybrid sharding.

    The mesh says 1 for the size of that dimension, since it changes with every quorum; FSDP2 asks
    the group itself when it divides. Every member counts alike, so all must bring as many samples.
    From now on the group holds its errors, because FSDP2 cannot stop in the middle of a backward
    pass: call `group.settle()` after it.
    """
    group.hold_errors = True
    if group.group_name not in c10d._world.pg_names.values():
        register(group)
    names = inner.mesh_dim_names or tuple(f"inner{i}" for i in range(inner.ndim))
    return DeviceMesh.from_group(
        [group, *(inner.get_group(dim) for dim in range(inner.ndim))],
        inner.device_type,
        mesh=inner.mesh.unsqueeze(0),
        mesh_dim_names=(name, *names),
    )
