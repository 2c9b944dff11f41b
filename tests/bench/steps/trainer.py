"""One group that times its steps: ours, torchft's, or plain DistributedDataParallel over gloo."""

import json
import os
import statistics
import sys
import time

import torch


def model_and_data():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(16, 64)


def report(times):
    times = sorted(times[len(times) // 4 :])
    print(json.dumps({"p50": statistics.median(times), "p10": times[len(times) // 10]}), flush=True)


def ours(config):
    from ftcore import Manager

    model, optimizer, inputs = model_and_data()
    times = []
    with Manager(
        model,
        optimizer,
        shards=config["groups"],
        mode=config["mode"],
        lighthouse=config["address"],
        replica_id=config["name"],
    ) as manager:
        began = time.perf_counter()
        for step in manager.steps(config["steps"]):
            for _ in step:
                model(inputs).square().mean().backward()
            optimizer.step()
            now = time.perf_counter()
            times.append(now - began)
            began = now
    report(times)


def ddp(config):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(config["port"]))
    dist.init_process_group("gloo", rank=config["rank"], world_size=config["groups"])
    model, optimizer, inputs = model_and_data()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    times = []
    for _ in range(config["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    report(times)
    dist.destroy_process_group()


def torchft(config):
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    model, optimizer, inputs = model_and_data()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{config['address']}"
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        replica_id=config["name"],
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    wrapped = OptimizerWrapper(manager, optimizer)
    times = []
    while manager.current_step() < config["steps"]:
        began = time.perf_counter()
        wrapped.zero_grad()
        model(inputs).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        manager.allreduce(flat).wait()
        offset = 0
        for p in model.parameters():
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        wrapped.step()
        times.append(time.perf_counter() - began)
    report(times)
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = json.loads(sys.argv[1])
    {"ours": ours, "ddp": ddp, "torchft": torchft}[config["kind"]](config)
