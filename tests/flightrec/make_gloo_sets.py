"""Make the gloo dump sets of gloo_sets.tar.gz: one small faulty job each, dumped by torch itself.

Run by hand: `python tests/flightrec/make_gloo_sets.py OUT [NAME…]`. A rank runs its job in a
thread; when that ends or stands still, the main thread dumps (gloo never does by itself) and exits.
"""

import datetime
import json
import os
import sys
import threading
import time
from pathlib import Path

WORLD, STANDSTILL_S = 4, 8.0
CASES = {}


def case(culprits, kind, seq=None, world=WORLD):
    def register(job):
        CASES[job.__name__] = (job, culprits, kind, seq, world)
        return job

    return register


def stay():
    threading.Event().wait()


def train_step(rank, dist, torch, n=64, group=None):
    dist.all_reduce(torch.ones(n), group=group)


@case([], "healthy")
def healthy(rank, dist, torch):
    for step in range(4):
        train_step(rank, dist, torch)
        dist.broadcast(torch.ones(8), src=step % 4)
        dist.all_gather([torch.ones(5) for _ in range(4)], torch.ones(5))
        dist.all_gather_into_tensor(torch.ones(20), torch.ones(5))
        dist.reduce(torch.ones(7), dst=1)
        dist.gather(torch.ones(6), [torch.ones(6)] * 4 if rank == 0 else None, dst=0)
        dist.scatter(torch.ones(3), [torch.ones(3)] * 4 if rank == 2 else None, src=2)
        dist.all_to_all_single(torch.ones(8), torch.ones(8))
        dist.barrier()


@case([], "healthy")
def healthy_subgroups(rank, dist, torch):
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for _ in range(3):
        for _ in range(4):
            train_step(rank, dist, torch, 32, tp)
        train_step(rank, dist, torch, 128, dp)


@case([], "healthy")
def healthy_p2p_ring(rank, dist, torch):
    for _ in range(3):
        work = dist.isend(torch.ones(9), (rank + 1) % 4)
        dist.recv(torch.ones(9), (rank + 3) % 4)
        work.wait()
        train_step(rank, dist, torch)


@case([2], "never_issued", 5)
def hang_missing_call(rank, dist, torch):
    for step in range(8):
        if step == 4 and rank == 2:
            stay()
        train_step(rank, dist, torch)


@case([3], "never_issued", 7)
def hang_in_tp(rank, dist, torch):
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(4):
        for layer in range(4):
            if rank == 3 and (step, layer) == (1, 2):
                stay()
            train_step(rank, dist, torch, 32, tp)
        train_step(rank, dist, torch, 128, dp)


@case([1], "died", 4)
def rank_killed(rank, dist, torch):
    for step in range(6):
        if step == 3 and rank == 1:
            os.kill(os.getpid(), 9)
        train_step(rank, dist, torch)


@case([1], "wrong_op", 5)
def wrong_op(rank, dist, torch):
    for step in range(8):
        if step == 4 and rank == 1:
            dist.all_gather_into_tensor(torch.ones(64), torch.ones(16))
        else:
            train_step(rank, dist, torch)


@case([3], "size_mismatch", 4)
def size_mismatch(rank, dist, torch):
    for step in range(6):
        train_step(rank, dist, torch, 128 if (rank, step) == (3, 3) else 64)


@case([0], "dtype_mismatch", 4)
def dtype_mismatch(rank, dist, torch):
    for step in range(6):
        dtype = torch.float64 if (rank, step) == (0, 3) else torch.float32
        dist.all_reduce(torch.ones(64, dtype=dtype))


@case([2], "skipped_call", 5)
def skipped_call(rank, dist, torch):
    for step in range(4):
        dist.all_reduce(torch.ones(64))
        if not (rank == 2 and step == 1):
            dist.all_reduce(torch.ones(64) * 2)
        dist.all_reduce(torch.ones(64) * 3)


@case([0], "extra_call", 6)
def extra_call(rank, dist, torch):
    for step in range(4):
        dist.all_reduce(torch.ones(64))
        dist.all_reduce(torch.ones(64) * 2)
        if rank == 0 and step == 1:
            dist.all_reduce(torch.zeros(64))
        dist.all_reduce(torch.ones(64) * 3)


@case([3], "uneven_inputs", 10)
def uneven_inputs(rank, dist, torch):
    for _ in range(3 if rank == 3 else 4):
        for n in (16, 32, 64):
            train_step(rank, dist, torch, n)
    dist.barrier()


@case([2], "root_mismatch", 4)
def wrong_root_gather(rank, dist, torch):
    for step in range(6):
        dst = 2 if (rank, step) == (2, 3) else 0
        dist.gather(torch.ones(6), [torch.ones(6)] * 4 if rank == dst else None, dst=dst)


@case([1], "order_inversion")
def order_inversion(rank, dist, torch):
    a, b = dist.new_group(), dist.new_group()
    for step in range(5):
        groups = (b, a) if (rank, step) == (1, 3) else (a, b)
        for group in groups:
            train_step(rank, dist, torch, 64, group)


@case([1], "p2p_no_partner")
def pipeline_leaves_early(rank, dist, torch):
    for batch in range(4):
        if rank == 1 and batch == 3:
            break
        if rank > 0:
            dist.recv(torch.ones(9), rank - 1)
        if rank < 3:
            dist.send(torch.ones(9), rank + 1)
    train_step(rank, dist, torch)


@case([2], "init_hang")
def new_group_not_joined(rank, dist, torch):
    train_step(rank, dist, torch)
    if rank == 2:
        stay()
    group = dist.new_group([0, 1, 2, 3])
    train_step(rank, dist, torch, 32, group)


@case([3], "straggler")
def straggler(rank, dist, torch):
    for step in range(12):
        if rank == 3 and step > 1:
            time.sleep(0.2)
        train_step(rank, dist, torch)


@case([1, 6], "never_issued", world=8)
def two_culprits(rank, dist, torch):
    group = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][rank // 4]
    for step in range(6):
        if (rank, step) in ((1, 2), (6, 4)):
            stay()
        train_step(rank, dist, torch, 32, group)
    train_step(rank, dist, torch)


@case([2], "never_issued", 51)
def buffer_wrap(rank, dist, torch):
    for step in range(60):
        if rank == 2 and step == 50:
            stay()
        train_step(rank, dist, torch)


def run_rank(name, rank, port_file, out):
    import torch
    import torch.distributed as dist

    job, _culprits, _kind, _seq, world = CASES[name]
    store = dist.FileStore(str(port_file), world)
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    thread = threading.Thread(target=_quietly, args=(job, rank, dist, torch), daemon=True)
    thread.start()
    thread.join(STANDSTILL_S)
    dump = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    (out / f"nccl_trace_rank_{rank}").write_bytes(dump)
    time.sleep(1.5)  # nobody's exit may look like a fault to the others
    os._exit(0)


def _quietly(job, rank, dist, torch):
    try:
        job(rank, dist, torch)
    except Exception as error:
        print(f"rank {rank}: {error}"[:200], file=sys.stderr)


def make(name, root):
    _job, culprits, kind, seq, world = CASES[name]
    out = root / name / "dumps"
    out.mkdir(parents=True)
    port_file = root / f"{name}.store"
    size = "20" if name == "buffer_wrap" else "2000"
    os.environ.update(TORCH_FR_BUFFER_SIZE=size, OMP_NUM_THREADS="1")
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            run_rank(name, rank, port_file, out)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    port_file.unlink(missing_ok=True)
    truth = {"culprits": culprits, "kind": kind, "seq": seq, "world_size": world}
    (root / name / "truth.json").write_text(json.dumps(truth) + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[2:] or CASES:
        make(chosen, Path(sys.argv[1]))
