"""One group that trains a tiny model and says when it commits: ours, torchft's, or plain DDP."""

import itertools
import json
import os
import sys
import time
from datetime import timedelta

import torch

BATCH = 16
EPOCH = 10**9  # samples: no epoch ends while this runs


def model_and_data():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(BATCH, 64)


class Commits:
    """Wall times of commits and samples lost: printed as they come, or the intervals at the end."""

    def __init__(self, config):
        self.is_told, self.intervals = config["tell"], []
        self._last = time.perf_counter()
        self.pending = set()

    def draw(self, samples):
        """Samples that this group works on from now."""
        if self.is_told:
            self.pending.update(samples)

    def note(self, step, samples):
        """`samples` are in the committed step; what was drawn and is in none is lost so far."""
        if self.is_told:
            self.pending.difference_update(samples)
            sys.stdout.write(f"{step} {time.time()} {len(self.pending)}\n")
            sys.stdout.flush()
        now = time.perf_counter()
        self.intervals.append(now - self._last)
        self._last = now

    def report(self):
        steady = sorted(self.intervals[len(self.intervals) // 4 :])
        quantiles = {q: steady[int(len(steady) * q)] for q in (0.1, 0.5, 0.9)}
        print(json.dumps(quantiles), flush=True)


def ours(config):
    from ftcore import ElasticSampler, Manager

    model, optimizer, inputs = model_and_data()
    commits = Commits(config)
    data = ElasticSampler(EPOCH, shards=config["groups"], per_shard=BATCH)
    with Manager(
        model,
        optimizer,
        data=data,
        mode=config["mode"],
        lighthouse=config["address"],
        replica_id=config["name"],
    ) as manager:
        for step in manager.steps(config["steps"]):
            samples = set()
            for shard in step:
                samples.update(ids := shard.samples)
                commits.draw(ids)
                model(inputs).square().mean().backward()
            optimizer.step()
            commits.note(step.index, samples)
    commits.report()


def ddp(config):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(config["port"]))
    dist.init_process_group("gloo", rank=config["rank"], world_size=config["groups"])
    model, optimizer, inputs = model_and_data()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    commits = Commits(config)
    for step in range(config["steps"]):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        commits.note(step, ())
    commits.report()
    dist.destroy_process_group()


def torchft(config):
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    model, optimizer, inputs = model_and_data()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        replica_id=config["name"],
        lighthouse_addr=f"http://{config['address']}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=config["heartbeat_ms"]),
    )
    wrapped, commits = OptimizerWrapper(manager, optimizer), Commits(config)
    # a loader that goes on, as its sampler does: a batch is drawn once, committed or not
    for draw in itertools.count():
        first = (draw * config["groups"] + config["rank"]) * BATCH
        samples = range(first, first + BATCH)
        commits.draw(samples)
        before = manager.current_step()
        if before >= config["steps"]:
            break
        wrapped.zero_grad()
        model(inputs).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        manager.allreduce(flat).wait()
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        wrapped.step()
        if manager.current_step() > before:
            commits.note(before, samples)
    commits.report()
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = json.loads(sys.argv[1])
    {"ours": ours, "ddp": ddp, "torchft": torchft}[config["kind"]](config)
