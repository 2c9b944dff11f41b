"""The training state that GPU figures are taken with: 604 M parameters, AdamW, 6.75 GiB in fp32."""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

GIB = 1 << 30


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_in(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_up(x))))


class Training:
    """A model, its optimizer and a batch; `small` is for trying a script out."""

    def __init__(self, *, small=False, seed=0):
        torch.manual_seed(seed)
        width, layers, length, batch = (1024, 2, 512, 2) if small else (4096, 3, 2048, 6)
        with torch.device("cuda"):
            self.model = nn.Sequential(*(Block(width, 32) for _ in range(layers)))
            self.batch = torch.randn(batch, length, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        for _ in range(5):
            self.step()

    def step(self):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def tensors(self):
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": v for k, v in values.items()}
        return found

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors().values())

    def clones(self):
        return {k: v.clone() for k, v in self.tensors().items()}

    def equals(self, clones):
        return all(torch.equal(v, clones[k]) for k, v in self.tensors().items())


def time_steps(training, count):
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def lost_per_save(training, save, *, saves, every, finish):
    """Per save the milliseconds that the call took, and that it and the `every` steps after it took
    longer than the `every` steps before it, in which nothing is saved."""
    calls, lost, usual = [], [], []
    time_steps(training, every // 4)
    for number in range(saves):
        usual.append(timed(lambda: time_steps(training, every)))
        started = time.perf_counter()
        save(number)
        calls.append(time.perf_counter() - started)
        lost.append(calls[-1] + timed(lambda: time_steps(training, every)) - usual[-1])
    finish()
    return {
        "step_ms": round(1e3 * statistics.median(usual) / every, 2),
        "call_ms": [round(1e3 * s, 1) for s in calls],
        "lost_ms": [round(1e3 * s, 1) for s in lost],
    }


def timed(call):
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started
