"""Two replica groups of two ranks as four real processes over gloo."""

import json
import multiprocessing
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ftcore.heal import Offer
from ftcore.process_group import GlooGroup, host_store
from ftcore.process_group.store import connect_store

GROUPS, RANKS = 2, 2
HANG_S = 120.0
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def loss_of(output):
    return output.float().pow(2).mean()


def full_gradients(m):
    """The gradients of all parameters in whole, whatever shards they are in."""
    grads = [p.grad for p in m.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def expected_gradients(x=X):
    """The stupid twin: one process, one batch."""
    m = model()
    loss_of(m(x)).backward()
    return [p.grad for p in m.parameters()]


def assert_close(got, expected, *, within=1e-5):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, atol=within, rtol=within)


@dataclass
class Member:
    """One process: rank `rank` of replica group `replica`; its inner world is its replica group."""

    replica: int
    rank: int
    address: str
    made: list = field(default_factory=list)

    @property
    def half(self):
        """The samples of this replica group."""
        return X.chunk(GROUPS)[self.replica]

    @property
    def quarter(self):
        """The samples of this rank, when the inner ranks are data parallel."""
        return self.half.chunk(RANKS)[self.rank]

    def group(self, case, *, world_size=GROUPS, quorum=1, **options):
        """A configured group of the ranks with this rank's number in both replica groups."""
        group = GlooGroup(**options)
        self.made.append(group)
        self.configure(group, case, world_size=world_size, quorum=quorum)
        return group

    def _letters(self):
        return dist.PrefixStore(f"letters/{self.rank}", connect_store(self.address, timeout_s=60))

    def say(self, name, offer):
        """To the rank with this number in the other replica group."""
        self._letters().set(name, json.dumps(offer and offer.to_json()))

    def hear(self, name):
        said = json.loads(self._letters().get(name))
        return Offer.from_json(said) if said else None

    def configure(self, group, case, *, world_size=GROUPS, quorum=1):
        group.configure(
            store_address=self.address,
            prefix=f"{case}/{quorum}/{self.rank}",
            rank=self.replica,
            world_size=world_size,
            timeout_s=HANG_S,
        )


def run_cases(replica, rank, address, cases, results):
    torch.set_num_threads(1)
    member = Member(replica=replica, rank=rank, address=address)
    store = dist.PrefixStore(f"inner/{replica}", connect_store(address, timeout_s=HANG_S))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=HANG_S)
    )
    for case in cases:
        try:
            case(member)
            outcome = ""
        except BaseException:
            outcome = traceback.format_exc()
        results.put((case.__name__, replica, rank, outcome))
        for group in member.made:
            group.close()
        if outcome:
            break  # the ranks are out of step now
    dist.destroy_process_group()


def run_everywhere(cases):
    """Run all cases in four processes. Returns name -> tracebacks: none when it passed."""
    context = multiprocessing.get_context("spawn")
    host, results = host_store(), context.Queue()
    processes = [
        context.Process(target=run_cases, args=(g, r, host.address, cases, results), daemon=True)
        for g in range(GROUPS)
        for r in range(RANKS)
    ]
    for process in processes:
        process.start()
    outcomes = {case.__name__: [] for case in cases}
    ran = {case.__name__: 0 for case in cases}
    try:
        for _ in range(len(cases) * len(processes)):
            name, replica, rank, outcome = results.get(timeout=HANG_S)
            ran[name] += 1
            if outcome:
                outcomes[name].append(f"replica group {replica}, rank {rank}:\n{outcome}")
            if any(outcomes.values()):
                break
    except Exception as error:
        print(f"no more results: {error!r}", file=sys.stderr)
    finally:
        for process in processes:
            process.join(0.5 if any(outcomes.values()) else HANG_S)
            process.kill()
    return {
        name: found or ([] if ran[name] == len(processes) else ["did not run to its end"])
        for name, found in outcomes.items()
    }
