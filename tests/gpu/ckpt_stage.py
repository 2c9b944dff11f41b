"""On one GPU: staging is correct, and what it costs: `python -m tests.gpu.ckpt_stage`."""

import json
import statistics
import sys
import tempfile
import time

import torch

from ckpt import Checkpointer

LAYERS, WIDTH, BATCH, STEPS, EVERY = 24, 3072, 8192, 240, 80


def make(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def step(model, optimizer, batch):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def tensors(model, optimizer):
    found = dict(model.state_dict())
    for i, values in optimizer.state_dict()["state"].items():
        found |= {f"{i}.{k}": v for k, v in values.items()}
    return found


def loop(model, optimizer, batch, checkpoints):
    """Seconds of each step, and of each call of save."""
    steps, calls = [], []
    for number in range(STEPS):
        started = time.perf_counter()
        step(model, optimizer, batch)
        if checkpoints is not None and number % EVERY == EVERY - 1:
            called = time.perf_counter()
            checkpoints.save({"model": model, "optimizer": optimizer}, step=number)
            calls.append(time.perf_counter() - called)
        steps.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return steps, calls


def measure(path, name, *, snapshot):
    model, optimizer = make(0)
    batch = torch.randn(BATCH, WIDTH, device="cuda")
    for _ in range(5):
        step(model, optimizer, batch)
    state = {"model": model, "optimizer": optimizer}
    nbytes = sum(t.nbytes for t in tensors(model, optimizer).values())
    with Checkpointer(path, keep_last=1, linger_s=2) as checkpoints:
        if not snapshot:
            checkpoints._saver._copier.cuda.snapshot = lambda captured: (captured, None)
        started = time.perf_counter()
        checkpoints.save(state, step=1000).wait_staged(120)
        first_s = time.perf_counter() - started
        checkpoints.wait(300)
        base, _ = loop(model, optimizer, batch, None)
        median = statistics.median(base)
        steps, calls = loop(model, optimizer, batch, checkpoints)
        lost = (sum(steps) - STEPS * median) / len(calls)
        checkpoints.wait(300)
        started = time.perf_counter()
        handle = checkpoints.save(state, step=2000)
        handle.wait_staged(60)
        staged_s = time.perf_counter() - started
        durable = handle.wait_durable(120)
        expected = {k: v.clone() for k, v in tensors(model, optimizer).items()}
        step(model, optimizer, batch)
        started = time.perf_counter()
        checkpoints.restore(state)
        torch.cuda.synchronize()
        restore_s = time.perf_counter() - started
        tier = checkpoints.last_restored.tier
        found = tensors(model, optimizer)
        same = all(torch.equal(found[k], expected[k]) for k in expected)
    line = {
        "what": name,
        "state_gib": nbytes / 2**30,
        "step_ms": 1e3 * median,
        "calls_ms": [round(1e3 * c, 1) for c in calls],
        "lost_ms_per_save": 1e3 * lost,
        "first_staged_s": first_s,
        "staged_s": staged_s,
        "staged_gib_s": nbytes / 2**30 / staged_s,
        "durable_s": [d.seconds for d in durable.values()],
        "restore_s": restore_s,
        "restore_tier": tier[:6],
        "restored_equal": same,
        "lost_s_reported": checkpoints.lost_s,
    }
    print(json.dumps(line), flush=True)
    assert same


def torn(path):
    """Steps right after save, on the device, never tear what is saved."""
    model, optimizer = make(1)
    batch = torch.randn(64, WIDTH, device="cuda")
    step(model, optimizer, batch)
    with Checkpointer(path, keep_last=1, linger_s=2) as checkpoints:
        for number in range(4):
            expected = {k: v.clone() for k, v in tensors(model, optimizer).items()}
            handle = checkpoints.save({"model": model, "optimizer": optimizer}, step=number)
            for _ in range(3):
                step(model, optimizer, batch)
            handle.wait_durable(120)
            checkpoints.restore({"model": model, "optimizer": optimizer})
            found = tensors(model, optimizer)
            assert all(torch.equal(found[k], expected[k]) for k in expected), number
    print(json.dumps({"what": "steps right after save", "torn": 0, "tries": 4}), flush=True)


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name(), file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        torn(f"{root}/torn")
        measure(f"{root}/a", "device snapshot, then paced copies", snapshot=True)
        measure(f"{root}/b", "no room: optimizer waits for the copies", snapshot=False)
