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
    """Train on, save before every `every`-th step, and return per save the milliseconds that the
    call took and that training lost until the next save, against the median step without one."""
    usual = statistics.median(time_steps(training, every))
    calls, lost = [], []
    for number in range(saves):
        started = time.perf_counter()
        save(number)
        calls.append(time.perf_counter() - started)
        time_steps(training, every)
        torch.cuda.synchronize()
        lost.append(time.perf_counter() - started - every * usual)
    finish()
    return {
        "step_ms": round(1e3 * usual, 2),
        "call_ms": [round(1e3 * s, 1) for s in calls],
        "lost_ms": [round(1e3 * s, 1) for s in lost],
    }
