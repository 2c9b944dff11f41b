"""What a checkpoint costs training on one GPU, beside DCP: `python -m tests.gpu.ckpt_stage [DIR]`.

`--small` tries the script out in seconds. Prints one JSON object per row.
"""

import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt import Checkpointer, staging_cuda
from tests.gpu.training import GIB, Training, lost_per_save, time_steps


def say(what, **facts):
    print(json.dumps({"what": what, **facts}), flush=True)


@contextmanager
def only_free(training, nbytes):
    """Let snapshots see no more than this much room on the device."""
    kept = staging_cuda.DEVICE_ROOM_BYTES
    unused = staging_cuda.DeviceMemory().room(training.batch.device)
    staging_cuda.DEVICE_ROOM_BYTES += unused - nbytes
    yield
    staging_cuda.DEVICE_ROOM_BYTES = kept


def no_checkpoint(training, size):
    """How far the measure itself is off."""
    say("no checkpoint", **lost_per_save(training, lambda _: None, finish=int, **size))


def ours(training, folder, what, size):
    with Checkpointer(folder, keep_last=1, linger_s=2) as checkpoints:
        ready, started = threading.Event(), time.perf_counter()
        checkpoints.prepare(training.state)
        called_s = time.perf_counter() - started
        checkpoints._saver.submit_call(ready.set)
        ready.wait(120)
        ready_s = time.perf_counter() - started
        handles = []

        def save(number):
            handles.append(checkpoints.save(training.state, step=number))

        found = lost_per_save(training, save, finish=checkpoints.wait, **size)
        durable_s = [d.seconds for h in handles for d in h.wait_durable(120).values()]
        waited_s = checkpoints._gate.waited_s
    shutil.rmtree(folder)
    durable_s = round(statistics.median(durable_s), 2)
    facts = {"ready_s": round(ready_s, 2), "prepare_call_ms": round(1e3 * called_s, 1)}
    say(what, **found, host_waits_ms=round(1e3 * waited_s, 1), durable_s=durable_s, **facts)


def dcp_async_pinned(training, folder, size):
    """DCP's best: pinned memory, kept from save to save. Its stager closes itself after the first
    save and fails in the second (torch 2.11), so close() is switched off here."""
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=True,
    )
    stager = DefaultStager(options)
    stager._state_dict_stager.close = lambda: None
    staging, uploads = [], []

    def save(number):
        for upload in uploads:
            upload.result()
        writer = dcp.FileSystemWriter(folder, thread_count=4, sync_files=False, overwrite=True)
        response = dcp.async_save(
            training.tensors(),
            storage_writer=writer,
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
        )
        staging.append(response.staging_completion)
        uploads[:] = [response.upload_completion]

    def wait_staged(*_):
        while staging:
            staging.pop().result()

    hook = training.optimizer.register_step_pre_hook(wait_staged)
    found = lost_per_save(training, save, finish=lambda: uploads[0].result(), **size)
    hook.remove()
    stager.close()
    say("DCP async_save, pinned, stager repaired", **found)
    shutil.rmtree(folder)


def torn(training, folder):
    """Steps right after save never tear what is saved, with and without room on the device."""
    for room in (None, 0):
        limited = nullcontext() if room is None else only_free(training, room)
        with limited, Checkpointer(folder, keep_last=1, linger_s=2) as checkpoints:
            for number in range(3):
                expected = training.clones()
                handle = checkpoints.save(training.state, step=number)
                time_steps(training, 3)
                handle.wait_durable(120)
                checkpoints.restore(training.state)
                assert training.equals(expected), f"save {number}, room {room}"
                del expected
        shutil.rmtree(folder)
    say("steps right after save, with and without room", tries=6, torn=0)


def link_rate():
    """GiB/s of one large copy from page-locked memory to the device."""
    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 / min(seconds)


def restores(training, folder):
    size = training.nbytes / GIB
    with Checkpointer(folder, keep_last=1, linger_s=20) as checkpoints:
        expected = training.clones()
        checkpoints.save(training.state, step=1).wait_durable(120)
        for tier in ("memory", "memory again"):
            timed_restore(checkpoints, training, expected, tier, size)
    with Checkpointer(folder, linger_s=2) as checkpoints:
        checkpoints._memory = lambda: None
        for tier in ("disk, in the page cache", "disk again"):
            timed_restore(checkpoints, training, expected, tier, size)
    shutil.rmtree(folder)
    say("one large pinned copy to the device", gib_s=round(link_rate(), 1))


def timed_restore(checkpoints, training, expected, tier, size):
    training.step()
    started = time.perf_counter()
    checkpoints.restore(training.state)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert training.equals(expected)
    found = checkpoints.last_restored.tier[:6]
    say(f"restore: {tier}", found=found, s=round(seconds, 3), gib_s=round(size / seconds, 1))


def main(arguments):
    if not torch.cuda.is_available():
        print("skipped: this needs a GPU")
        return
    small = "--small" in arguments
    size = {"saves": 2, "every": 10} if small else {"saves": 4, "every": 60}
    parent = next((a for a in arguments if not a.startswith("--")), None)
    with tempfile.TemporaryDirectory(dir=parent) as root:
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)
        training = Training(small=small)
        parameters = sum(p.numel() for p in training.model.parameters())
        gib = round(training.nbytes / GIB, 2)
        say("state", parameters=parameters, gib=gib, torch=torch.__version__, **size)
        torn(training, f"{root}/torn")
        no_checkpoint(training, size)
        ours(training, f"{root}/a", "ours: snapshot on the device", size)
        with only_free(training, training.nbytes // 3):
            ours(training, f"{root}/b", "ours: room for a third", size)
        with only_free(training, 0):
            ours(training, f"{root}/c", "ours: no room, optimizer behind an event", size)
        dcp_async_pinned(training, f"{root}/d", size)
        no_checkpoint(training, size)
        restores(training, f"{root}/e")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
