"""How soon page-locked memory is ready: `python -m tests.gpu.pinned_pool [GIB] [--advise]`.

`--advise` (root) first lets shared memory have huge pages, as an administrator would for good:
`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`.
"""

import json
import sys
import time
from pathlib import Path

import torch

from ckpt.pinned import PinnedMemory, touch
from ckpt.region import Region
from ckpt.staging_cuda import CudaCopier
from tests.gpu.training import GIB

SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def say(what, nbytes, seconds, host):
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    host.copy_(device, non_blocking=True)
    queued = time.perf_counter() - started
    torch.cuda.synchronize()
    rate = nbytes / GIB / (time.perf_counter() - started)
    is_async = queued < 0.01
    facts = {"ready_s": round(seconds, 2), "copy_gib_s": round(rate, 1), "is_async": is_async}
    print(json.dumps({"what": what, "gib": nbytes / GIB, **facts}), flush=True)


def grow(nbytes):
    """A virtual machine may get its memory only now: that is not what is measured."""
    import mmap

    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        started = time.perf_counter()
        view = torch.frombuffer(memory, dtype=torch.uint8)
        touch(view.data_ptr(), nbytes)
        del view
    print(f"first touch of {nbytes / GIB:.0f} GiB: {time.perf_counter() - started:.1f} s")


def private(nbytes):
    started = time.perf_counter()
    with PinnedMemory(nbytes) as memory:
        say("ours, private", nbytes, time.perf_counter() - started, memory.tensor)


def shared(nbytes):
    """Staging memory, which the daemon maps, too."""
    copier = CudaCopier()
    started = time.perf_counter()
    with Region.create(nbytes) as region:
        region.prefault()
        touched = time.perf_counter() - started
        copier.register(region)
        seconds = time.perf_counter() - started
        view = torch.frombuffer(region.view, dtype=torch.uint8)
        say(f"ours, shared (touched after {touched:.2f} s)", nbytes, seconds, view)
        copier.forget(region)
        del view


def pin_memory(nbytes):
    started = time.perf_counter()
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    say("torch pin_memory", nbytes, time.perf_counter() - started, memory)
    del memory
    torch._C._host_emptyCache()


def main(arguments):
    if not torch.cuda.is_available():
        print("skipped: this needs a GPU")
        return
    nbytes = int(float(next((a for a in arguments if not a.startswith("-")), "16")) * GIB)
    torch.zeros(1, device="cuda")
    grow(int(2.5 * nbytes))
    print("huge pages for shared memory:", SHMEM.read_text().strip() if SHMEM.exists() else "?")
    for measure in (private, private, shared, shared, pin_memory):
        measure(nbytes)
    if "--advise" in arguments:
        SHMEM.write_text("advise")
        print("huge pages for shared memory:", SHMEM.read_text().strip())
        for measure in (shared, shared, shared, private, private, private):
            measure(nbytes)


if __name__ == "__main__":
    main(sys.argv[1:])
