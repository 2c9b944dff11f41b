"""A rank of a small gloo job that hangs, for the tests of watch: RANK WORLD STORE PREFIX MODE."""

import datetime
import sys
import threading

import torch
import torch.distributed as dist

import flightrec


def load_next_batch():
    """Where the guilty rank is stuck."""
    threading.Event().wait(120)


def train(rank, mode):
    for step in range(6):
        if step == 4 and rank == 1 and mode == "stuck":
            print("hanging", flush=True)
            load_next_batch()
        work = dist.all_reduce(torch.ones(16), async_op=True)
        if step == 4:
            print("hanging", flush=True)  # the call is recorded by now
        work.wait()


def main():
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store, prefix, mode = sys.argv[3:6]
    warm = flightrec.warm_recorder()
    with flightrec.dump_on_request(prefix, rank):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=120),
        )
        warm.join()
        if mode == "healthy":
            for _ in range(6):
                dist.all_reduce(torch.ones(16))
            print("hanging", flush=True)
            load_next_batch()
        train(rank, mode)


if __name__ == "__main__":
    main()
