"""Run functions of this file on several ranks: `python -m tests.ckpt.ranks NAME ARGS then ...`."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt import Checkpointer, per_rank
from tests.ckpt.conftest import kill_daemon
from tests.ckpt.dying import die_at

ROOT = Path(__file__).parents[2]


def run_ranks(name, ranks, *args, check=True, timeout=180):
    """Results of all ranks: (return code, output)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.ckpt.ranks", name, *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    results = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        results.append((process.returncode, output))
    if check:
        assert all(code == 0 for code, _ in results), "\n".join(out for _, out in results)
    return results


def full(name, shape):
    """The same values on every rank and in every world."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


SHAPES = {"even": (16, 8), "uneven": (7, 5), "short": (2, 3), "large": (256, 1024)}


def sharded(layout, fill):
    """A state of DTensors in one of several layouts, a replicated tensor, and per-rank values."""
    world = dist.get_world_size()
    if layout == "2d":
        mesh = init_device_mesh("cpu", (world // 2, 2))
        placements = {n: [Shard(0), Shard(1)] for n in SHAPES}
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2))
        placements = {n: [Replicate(), Shard(0)] for n in SHAPES}
    else:
        mesh = init_device_mesh("cpu", (world,))
        placements = {n: [Shard(1 if layout == "columns" else 0)] for n in SHAPES}
    state = {
        n: distribute_tensor(full(n, s) if fill else torch.zeros(s), mesh, placements[n])
        for n, s in SHAPES.items()
    }
    plain = full("plain", (300, 1000))
    state["plain"] = plain if fill else torch.zeros_like(plain)
    mine = torch.full((5,), float(dist.get_rank()) if fill else -1.0)
    return {"model": state, "own": per_rank({"rng": mine, "seen": dist.get_rank() if fill else -1})}


def check(state, *, same_world):
    for name, tensor in state["model"].items():
        expected = full(name, tuple(tensor.shape))
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(found, expected), name
    if same_world:
        own = state["own"].value
        assert own["seen"] == dist.get_rank() and own["rng"][0] == dist.get_rank()


def save(path, layout, *steps):
    state = sharded(layout, fill=True)
    with Checkpointer(path) as checkpoints:
        for step in steps or (1,):
            checkpoints.save(state, step=int(step)).wait_durable(60)
    dist.barrier()


def load(path, layout, same_world, tier=""):
    state = sharded(layout, fill=False)
    with Checkpointer(path) as checkpoints:
        assert checkpoints.restore(state) == 1
        print("BYTES", checkpoints.last_restored.bytes)
    check(state, same_world=same_world == "same")
    dist.barrier()


def one_dies(path):
    """Replicated state: rank 1 is killed before its share is staged, the others commit."""
    state = {"w": full("w", (4000, 1000))}
    checkpoints = Checkpointer(path, participants_timeout_s=5)
    checkpoints.save(state, step=1).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(state, step=2).wait_durable(60)
    checkpoints.close()
    os._exit(0)


def one_dies_at(path, owner, function, when):
    """Replicated state: rank 1 is killed at a named point of its save; rank 0 commits anyway."""
    state = {f"w{i}": full(f"w{i}", (1000, 500)) for i in range(4)}
    checkpoints = Checkpointer(path, participants_timeout_s=5)
    checkpoints.save(state, step=1).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 1:
        die_at("ckpt.saver", owner, function, when, 1)
    handle = checkpoints.save(state, step=2)
    handle.wait_durable(60)
    checkpoints.close()
    os._exit(0)


def sole_holder_dies(path):
    """Sharded state: nobody else has what rank 1 held, so the step is refused with the reason."""
    state = sharded("rows", fill=True)
    checkpoints = Checkpointer(path, participants_timeout_s=5)
    checkpoints.save(state, step=1).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoints.save(state, step=2).wait_durable(60)
    except Exception as error:
        print("REFUSED", type(error).__name__, error, flush=True)
    checkpoints.close()
    os._exit(0)


def waves(path):
    """Replicas with less staging memory than state: each stages and writes only its own part."""
    state = {f"w{i}": full(f"w{i}", (1 << 20,)) for i in range(12)}  # 48 MB
    with Checkpointer(path, staging_bytes_max=16 << 20) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step).wait_durable(60)
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpoints.restore(found) == 2
    assert all(torch.equal(found[name], state[name]) for name in state)
    dist.barrier()


def stages(path):
    """Pipeline stages: each rank has names of its own, as plain tensors."""
    rank = dist.get_rank()
    state = {f"stage{rank}": {"w": full(f"s{rank}", (100, 100))}}
    with Checkpointer(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step).wait_durable(60)
        found = {f"stage{rank}": {"w": torch.zeros(100, 100)}}
        assert checkpoints.restore(found, only=f"stage{rank}") == 2
    assert torch.equal(found[f"stage{rank}"]["w"], full(f"s{rank}", (100, 100)))
    dist.barrier()


def damaged_for_one(path):
    """The newest step is damaged where only rank 1 reads: both ranks must fall back together."""
    state = sharded("rows", fill=True)
    with Checkpointer(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 0:
        files = sorted(Path(path, "step-0000000002").glob("*-00001-*.safetensors"))
        for file in files:
            os.truncate(file, 4096)
    dist.barrier()
    found = sharded("rows", fill=False)
    with Checkpointer(path) as checkpoints:
        step = checkpoints.restore(found)
    assert step == 1, step
    check(found, same_world=True)
    dist.barrier()


def on_a_host_of_its_own():
    """Give this rank a daemon of its own, as if it were on another host."""
    runtime = Path(os.environ.setdefault("CKPT_RUNTIME_BASE", os.environ["CKPT_RUNTIME_DIR"]))
    runtime = runtime / f"host{dist.get_rank()}"
    runtime.mkdir(mode=0o700, exist_ok=True)
    os.environ["CKPT_RUNTIME_DIR"] = str(runtime)
    return runtime


def hosts(path):
    """Ranks on different hosts meet through the store, and leave nothing there but the step."""
    on_a_host_of_its_own()
    state = sharded("rows", fill=True)
    with Checkpointer(path) as checkpoints:
        checkpoints.save(state, step=1).wait_durable(60)
    dist.barrier()
    assert not list(Path(path).glob("step-*/notes/*/*"))
    found = sharded("rows", fill=False)
    with Checkpointer(path) as checkpoints:
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 1
    check(found, same_world=True)
    dist.barrier()
    stop_daemon()


def local_disks(path):
    """Each host has a disk of its own, with what its ranks held, and reads from there."""
    on_a_host_of_its_own()
    mine = Path(path, f"host{dist.get_rank()}")
    state = sharded("rows", fill=True)
    with Checkpointer(f"local:{mine}") as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.rmtree(mine / "step-0000000002")
    dist.barrier()
    found = sharded("rows", fill=False)
    with Checkpointer(f"local:{mine}") as checkpoints:
        checkpoints._memory = lambda: None
        assert checkpoints.restore(found) == 1  # the newest that every rank has
    check(found, same_world=True)
    dist.barrier()
    stop_daemon()


def host_dies(path):
    """Replicated state: the host of rank 1 is lost, daemon and all; rank 0 commits without it."""
    runtime = on_a_host_of_its_own()
    state = {"w": full("w", (4000, 1000))}
    checkpoints = Checkpointer(path, participants_timeout_s=2)
    checkpoints.save(state, step=1).wait_durable(60)
    dist.barrier()
    if dist.get_rank() == 1:
        kill_daemon(runtime)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(state, step=2).wait_durable(60)
    checkpoints.close()
    kill_daemon(runtime)
    os._exit(0)


def ring(path):
    """The host of rank 1 loses its memory, the disk is gone: its shard comes from its peer."""
    runtime = on_a_host_of_its_own()
    state = sharded("rows", fill=True)
    checkpoints = Checkpointer(path, memory_copies=1)
    checkpoints.save(state, step=1).wait_durable(60)
    checkpoints.wait()
    checkpoints.close(keep_memory=True)
    dist.barrier()
    if dist.get_rank() == 1:
        kill_daemon(runtime)
    else:
        shutil.rmtree(path)
    dist.barrier()
    found = sharded("rows", fill=False)
    with Checkpointer(path, memory_copies=1) as checkpoints:
        assert checkpoints.restore(found) == 1
        tier = checkpoints.last_restored.tier
    assert tier == ("peers" if dist.get_rank() else "memory"), tier
    check(found, same_world=True)
    dist.barrier()
    stop_daemon()


def stop_daemon():
    kill_daemon(Path(os.environ["CKPT_RUNTIME_DIR"]))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for job in " ".join(sys.argv[1:]).split(" then "):  # importing torch costs more than a job
        name, *args = job.split()
        globals()[name](*args)
    dist.destroy_process_group()
