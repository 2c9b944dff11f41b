"""A user's training loop on torchft 0.2.0, nothing of torchft replaced: prints one line a step."""

import hashlib
import json
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(replica_id, lighthouse, steps):
    torch.manual_seed(int.from_bytes(replica_id.encode(), "big") % 1000)  # healing makes them equal
    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=replica_id,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
        quorum_timeout=timedelta(seconds=60),
        quorum_retries=20,
        hostname="127.0.0.1",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        wrapped(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
        here = manager.num_participants()
        line = {"step": manager.current_step(), "groups": here, "state": digest}
        print(json.dumps(line), flush=True)
        time.sleep(0.05)
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
