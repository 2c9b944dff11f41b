"""Members that take outer steps together as threads, with the votes of a very small manager."""

from types import SimpleNamespace

import torch
from torch import nn

from ftcore.local_sgd.fragments import Schedule
from ftcore.local_sgd.outer import OuterSteps
from ftcore.local_sgd.replica import OuterOptimizer
from ftcore.process_group.fake import FakeGroup, FakeNetwork
from ftcore.wire import messages
from tests.reduce.members import HANG_S, each


def model(seed=0):
    m, generator = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)), torch.Generator()
    with torch.no_grad():
        for p in m.parameters():
            p.normal_(std=0.5, generator=generator.manual_seed(seed + p.numel()))
    return m


def batch(number, index):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * number + index))


def inner_step(m, optimizer, shard):
    loss = (m(batch(shard.step, shard.index)) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shard.loss = loss.detach()


class Member:
    def __init__(self, name, network, options):
        self.name, self.group, self.ran = name, FakeGroup(network), []
        self.model = model()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        options = {"optimizer": OuterOptimizer(), "schedule": Schedule(sync_every=4), **options}
        self.outer = OuterSteps(dict(self.model.named_parameters()), self.group, **options)
        self.loss = float("nan")

    def params(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def outer_params(self):
        return torch.cat([f.outer for f in self.outer.fragments])


class Rig:
    """`step()` lets all living members take one outer step, repeated until it is committed."""

    def __init__(self, names, **options):
        self.network, self.options = FakeNetwork(), options
        self.index, self.quorum_id, self.attempts = 0, 0, 0
        self.members, self.healing = [], frozenset()
        self.join(*names)
        self.healing = frozenset()

    def join(self, *names):
        """New members copy the state of the first, as a heal does."""
        new = [Member(name, self.network, self.options) for name in names]
        for member in new if self.members else []:
            member.model.load_state_dict(self.members[0].model.state_dict())
            member.outer.set_state(self.members[0].outer.get_state())
        self.healing = frozenset(names)
        self._quorum(sorted([*self.members, *new], key=lambda m: m.name))

    def kill(self, name):
        self._quorum([m for m in self.members if m.name != name])

    def _quorum(self, members):
        self.members, self.quorum_id = members, self.quorum_id + 1

        def configure(member):
            member.group.configure(
                store_address="memory:1",
                prefix=f"q{self.quorum_id}",
                rank=members.index(member),
                world_size=len(members),
                timeout_s=HANG_S,
            )

        each(members, configure)

    def step(self, *, during=lambda member, shard: None):
        """`during(member, shard)` runs after each inner step."""
        while True:
            self.attempts += 1
            reasons = each(self.members, lambda m: self._attempt(m, during))
            if not any(reasons):
                break
            alive = [m for m, reason in zip(self.members, reasons, strict=True) if reason != "dead"]
            self._quorum(alive)
        for member in self.members:
            member.outer.committed()
        self.index, self.healing = self.index + 1, frozenset()

    def _attempt(self, member, during):
        quorum = messages.Quorum(
            quorum_id=1,
            from_step=self.index,
            members=tuple(messages.Member(replica_id=m.name, incarnation=1) for m in self.members),
            healing=frozenset(self.healing),
        )
        step = SimpleNamespace(
            index=self.index, grant=SimpleNamespace(quorum=quorum), timed=lambda *_: None
        )
        for shard in member.outer.run(step, ()):
            inner_step(member.model, member.inner, shard)
            member.ran.append((shard.step, shard.index))
            if during(member, shard) == "die":
                member.group.abort("killed")
                return "dead"
        reason = member.outer.reduce(step, ())
        member.loss = getattr(step, "loss", float("nan"))
        return reason
