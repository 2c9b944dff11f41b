"""A group of two ranks that share each shard by DistributedDataParallel, for test_ranks.py."""

import os
import sys
import time

import torch
import torch.distributed as dist

from ftcore import Manager
from ftcore.demo.worker import sha256

STEPS = 60


def say(line):
    """One write, because two ranks share the pipe."""
    os.write(1, f"{line}\n".encode())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    limit_s = float(os.environ.get("LIMIT_S", "60"))
    with Manager(inner, optimizer, shards=2, collective_timeout_s=limit_s) as manager:
        for step in manager.steps(STEPS):
            for _ in step:
                inputs = torch.randn(8, 8)[rank::2]  # this rank's half of the shard
                model(inputs).square().mean().backward()
            optimizer.step()
            say(f"STEP {step.index} {len(step.members)} {os.getpid()}")
            time.sleep(0.1)
    say(f"SHA {sha256(inner.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
