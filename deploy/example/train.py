"""A training script as the manifests start it. SIGTERM lets its group leave in good order.

Run it with `FTCORE_LIGHTHOUSE=HOST:PORT FTCORE_REPLICA_ID=r0 python train.py`, several times with
other names; or by torchrun, once per rank.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from ftcore import Manager

STEPS = int(os.environ.get("STEPS", "1000"))
STEP_S = float(os.environ.get("STEP_S", "0"))  # a step of a real model takes its time
SHARDS = int(os.environ.get("SHARDS", "4"))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with Manager(model, optimizer, shards=SHARDS) as manager:
        for step in manager.steps(STEPS):
            for shard in step:
                inputs = torch.randn(4, 8)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                shard.log(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            print(
                f"step {step.index} loss {step.loss:.4f} with {' '.join(step.members)}", flush=True
            )
        print(f"drained: {manager.drained_because}" if manager.drained_because else "finished")


if __name__ == "__main__":
    main()
