"""What a training loop talks to: `for step in manager.steps(1000): for shard in step: ...`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from ftcore import __version__
from ftcore.base.errors import BadSetting
from ftcore.base.log import event
from ftcore.base.machine import this_machine
from ftcore.checkpoints import Checkpointer, JobCheckpoints
from ftcore.crew import Crew
from ftcore.data.sampler import ElasticSampler
from ftcore.elastic import ElasticGradients
from ftcore.errors import GroupStopped, NothingToReduce, StepNotIterated
from ftcore.gradients import ExactGradients, FastGradients, Gradients
from ftcore.guard_watch import Watch
from ftcore.guards import NO_GUARDS, Guards
from ftcore.heal import HealFailed, OfferRefused
from ftcore.link import Grant, Link, Verdict
from ftcore.live_state import LiveState
from ftcore.process_group.base import Group
from ftcore.process_group.errors import GroupError
from ftcore.process_group.gloo import GlooGroup
from ftcore.process_group.store import HostedStore, host_store
from ftcore.settings import current_env, find_place
from ftcore.start import find_manager, find_store
from ftcore.step import Step
from ftcore.wire import ftcore_pb2 as pb
from ftcore.wire.messages import show_id

log = logging.getLogger("ftcore")

_MEET_TIMEOUT_S = 10.0  # how long a group that has finished waits for the others

_GRADIENTS: dict[str, Callable[..., Gradients]] = {
    "exact": ExactGradients,
    "fast": FastGradients,
    "elastic": ElasticGradients,
}


class Manager:
    """Makes this process a rank of a replica group that survives the death of any other.

    shards: K, how many parts the global batch of a step has, the same for all groups for the whole
        run. Which group computes which shard changes with the members; what a step computes does
        not.
    data: whose position is committed with each step, healed and checkpointed; then `shard.samples`
        holds the ids of a shard's samples, and K may be left to it.
    mode: "exact" sums shards in shard order, so the weights are bit-identical to those of a run
        without failures. "fast" uses ordinary all-reduce. "elastic" is for loops that stay as
        they are, see ftcore.wrap: each group brings its own batch.
    gradients: what a step does instead, such as ftcore.local_sgd.DiLoCo(sync_every=100).
    detect_within_s: how long a rank may be stopped before its group is given up.
    guards: what has to be right before a step is committed, see ftcore.Guards. None: nothing is.
    guard: one of your own. It looks at each step after its reduction and before the vote; what it
        returns, if anything, is why the step must not be committed. It is repeated then.
    checkpoints: a ckpt.Checkpointer. Every `checkpoint_every` committed steps, and after the last,
        the groups save their state together; a job that begins, or begins again after all its
        groups were lost, goes on from the newest complete step. Closed with the manager.
    heal_bandwidth_max: bytes a second that this rank gives to those who heal, all together.
    collective_timeout_s: the last resort, when neither process, stream nor socket shows a death.
        A rank that still waits in a collective of its own so long after its group was lost is
        ended, with its stacks on stderr.
    hang_after_s: how long a step may take (the first one four times as long) before the flight
        records of all ranks are compared, and a group whose rank holds the others up is given up.
        Make it longer than any pause of one group alone, like an evaluation. 0: never. Default:
        half of collective_timeout_s.

    Group rank and size are taken from RANK and WORLD_SIZE, which mean the ranks within this
    replica group; lighthouse, replica_id, job and host also from FTCORE_LIGHTHOUSE,
    FTCORE_REPLICA_ID, FTCORE_JOB and FTCORE_HOST. Raises BadSetting.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        shards: int | None = None,
        data: ElasticSampler | None = None,
        mode: Literal["exact", "fast", "elastic"] = "exact",
        gradients: Callable[..., Gradients] | None = None,
        seed: int = 0,
        lighthouse: str | None = None,
        replica_id: str | None = None,
        job: str | None = None,
        host: str | None = None,
        group: Group | None = None,
        detect_within_s: float = 2.0,
        attach_timeout_s: float = 30.0,
        collective_timeout_s: float = 60.0,
        hang_after_s: float | None = None,
        heal_timeout_s: float = 600.0,
        heal_bandwidth_max: float | None = None,
        failed_steps_max: int = 10,
        guards: Guards | None = None,
        checkpoints: Checkpointer | None = None,
        checkpoint_every: int = 100,
        guard: Callable[[Step], str] | None = None,
    ) -> None:
        _refuse_what_cannot_work(model, mode)
        has_shards = mode != "elastic" and gradients is None
        self.shards = _count_shards(shards, data, at_least=0 if has_shards else 1)
        self.place = find_place(
            current_env(), lighthouse=lighthouse, job=job, replica_id=replica_id, host=host
        )
        self.seed, self.data = seed, data
        self.mode = mode if gradients is None else getattr(gradients, "__name__", str(gradients))
        self.until = 0
        self.group = group if group is not None else GlooGroup(interface=self.place.host)
        self.state = LiveState(
            model,
            optimizer,
            host=self.place.host,
            heal_timeout_s=heal_timeout_s,
            bandwidth_max=heal_bandwidth_max,
        )
        if data is not None:
            self.state.register("data", data.state_dict, data.load_state_dict)
        make = gradients if gradients is not None else _GRADIENTS[mode]
        self.gradients: Gradients = make(model, self.group, seed=seed)
        self.gradients.attach(self.state)
        self.watch = Watch(guards or NO_GUARDS, self.group, next(model.parameters()).device)
        self.state.register("guards", self.watch.get_state, self.watch.set_state)
        self.crew = Crew(self.group, place=self.place, timeout_s=collective_timeout_s)
        self.checkpoints: JobCheckpoints | None = None
        if checkpoints is not None:
            self.checkpoints = JobCheckpoints(
                checkpoints, every=checkpoint_every, state=self.state, place=self.place
            )
        self.drained_because = ""
        self._guard = guard
        self._limits = {
            "stopped_limit_s": detect_within_s,
            "attach_timeout_s": attach_timeout_s,
            "failed_steps_max": failed_steps_max,
            "hang_after_s": collective_timeout_s / 2 if hang_after_s is None else hang_after_s,
        }
        self._link: Link | None = None
        self._grant: Grant | None = None
        self._noted_id = 0
        self._store: HostedStore | None = None

    # For the training loop

    def register_state(
        self, name: str, get: Callable[[], object], set: Callable[[Any], None]
    ) -> None:
        """Heal and compare this state too: `get()` returns tensors and plain values, `set(value)`
        takes them back. Register everything before the first step; called between steps only."""
        if self._link is not None:
            raise BadSetting(
                f"state {name!r} was registered after the first step",
                remedy="Register all state before the first call of steps().",
            )
        self.state.register(name, get, set)

    def steps(self, until: int) -> Iterator[Step]:
        """Yield steps until `until` are committed by the job. Iterate over each step to its end.

        Blocks while there is no quorum. Ends early, without an error, when this group was drained.
        Raises GroupStopped when the lighthouse or the manager refuses this group, with the remedy.
        """
        self.until = until
        link = self._attached()
        try:
            while self.state.committed < until:
                grant = self._grant or link.wait_grant(until)
                if grant.step >= until and not grant.must_heal:
                    break
                self._grant = None
                step = Step(manager=self, grant=grant)
                yield step
                if not step.is_committed:
                    raise StepNotIterated(f"step {step.index} was left before it was committed")
                if self.checkpoints is not None:
                    self.checkpoints.step_ended(until=until)
            self.crew.meet(timeout_s=_MEET_TIMEOUT_S)
        except GroupStopped as stop:
            if not stop.facts.get("is_clean"):
                raise self._explained(stop) from None
            self.drained_because = str(stop)
            event(log, "group.drained", reason=str(stop))

    def _explained(self, stop: GroupStopped) -> GroupStopped:
        """Add the first difference when this group's state has another layout."""
        address = str(stop.facts.get("compare_with") or "")
        difference = self.state.difference_from(address) if address else ""
        if not difference:
            return stop
        return GroupStopped(f"{stop}: {difference}", remedy=stop.remedy)

    def drain(self, reason: str) -> None:
        """Leave in good order: the others go on without repeating a step, `steps` ends."""
        self._attached().leave(reason)

    def close(self, *, is_failure: bool = False) -> None:
        """Tell the manager that this rank is done, and release everything. Waits for checkpoints
        that are being written."""
        if self._link is not None:
            self._link.close("finished" if self.state.committed >= self.until else "closed")
            self._link = None
        self.state.close()
        self.group.close()
        if self.checkpoints is not None:
            self.checkpoints.close(keep_memory=is_failure)
        self._store = None

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(is_failure=error is not None)

    # For Step

    def enter(self, step: Step) -> str:
        """Be in the step's quorum, with its state. Return why that failed, or an empty string."""
        grant = step.grant
        began = time.perf_counter()
        try:
            self.crew.build(grant.quorum)
            step.timed("group_s", began)
            self._note_quorum(grant)
            if error := self.crew.error:
                return str(error)
            if grant.must_heal:
                self.gradients.forget()
                link = self._attached()
                step.times.heal_s = self.state.heal(grant, self.crew, tell=link.heal_progress)
                link.healed(self.state.lineage)
            elif grant.quorum.healing and grant.step == grant.quorum.from_step:
                step.times.export_s = self.state.offer(grant, self.crew)
        except (GroupError, HealFailed, OfferRefused, dist.DistError) as error:
            return str(error)
        return ""

    def refusal(self, step: Step) -> str:
        """Why the reduced step must not be committed, or an empty string."""
        try:
            step.objection = self.watch.objection(
                self.gradients, step=step.index, loss=step.loss, replica_ids=step.members
            )
        except GroupError as error:
            return str(error)
        if self.watch.must_leave:
            self.drain(self.watch.must_leave)
            self.watch.must_leave = ""
        if step.objection is not None:
            return step.objection.why
        return self._guard(step) if self._guard is not None else ""

    def _note_quorum(self, grant: Grant) -> None:
        quorum = grant.quorum
        if quorum.quorum_id != self._noted_id:
            self._noted_id = quorum.quorum_id
            if self.checkpoints is not None:
                self.checkpoints.quorum_changed(quorum)
            event(
                log,
                "group.built",
                quorum=show_id(quorum.quorum_id),
                step=grant.step,
                members=quorum.replica_ids,
                healing=sorted(quorum.healing),
                seconds=self.crew.built_s,
            )

    def settle(self, step: Step, reason: str) -> None:
        """Vote. If the step is not committed, wait until it may be repeated."""
        link = self._attached()
        step.times.held_s = self.state.held_s(step.times) if not reason else 0.0
        began = time.perf_counter()
        verdict = link.vote(
            step.grant,
            is_ok=not reason,
            reason=reason,
            until=self.until,
            group_s=step.times.group_s,
            heal_s=step.times.heal_s if step.grant.must_heal else 0.0,
            held_s=step.times.held_s,
            **self.watch.consequences(step.objection, self.place.replica_id),
        )
        step.timed("vote_s", began)
        if verdict.is_committed:
            self._commit(step, verdict)
            return
        event(log, "step.failed", step=step.index, reason=verdict.reason)
        if verdict.must_recompute:  # all ranks of the group or none: they compute together
            self.gradients.doubt()
        self.state.attempt_failed()
        step.grant = link.wait_grant(self.until)
        event(log, "step.repeated", step=step.index, quorum=show_id(step.quorum_id))

    def _commit(self, step: Step, verdict: Verdict) -> None:
        step.is_committed = True
        self._grant = verdict.grant
        self.state.commit(step.index, lineage=step.quorum_id)
        self.gradients.committed()
        self.watch.committed()
        if self.data is not None:
            self.data.commit()
        event(
            log,
            "step.committed",
            level=logging.DEBUG,
            step=step.index,
            loss=step.loss,
            members=step.members,
            quorum=show_id(step.quorum_id),
        )

    def _abort(self, quorum_id: int, reason: str) -> None:
        """Called on the link's thread: a member is lost, so what waits in the group must end."""
        self.crew.abort(quorum_id, reason)
        event(log, "step.aborted", quorum=show_id(quorum_id), reason=reason)

    # Start

    def _attached(self) -> Link:
        if self._link is None:
            self._link = self._attach()
        return self._link

    def _attach(self) -> Link:
        place = self.place
        store = find_store(place)
        self.state.ready()
        if self.checkpoints is not None:
            self.checkpoints.begin(store)
        if place.rank == 0:
            self._store = host_store(place.host)
        hello = pb.RankHello(
            rank=place.rank,
            pid=os.getpid(),
            machine=this_machine(),
            store_address=self._store.address if self._store else "",
            heal_address=self.state.address,
            committed=self.state.committed,
            lineage=self.state.lineage,
            settings=self._settings(),
        )
        link = Link(
            find_manager(place, self._limits, store),
            hello,
            silent_limit_s=self._limits["stopped_limit_s"],
            stuck_limit_s=self.crew.timeout_s,
            abort=self._abort,
            notice=_show,
        )
        event(log, "manager.attached", replica_id=place.replica_id, lighthouse=place.lighthouse)
        return link

    def _settings(self) -> dict[str, str]:
        """What has to be equal in all groups. The layout is compared rank by rank."""
        return {
            "ftcore version": __version__,
            "shards": str(self.shards),
            "mode": self.mode,
            "seed": str(self.seed),
            "guards": str(self.watch.guards),
            "ranks per group": str(self.place.ranks),
            "checkpoints": str(self.checkpoints or "none"),
            "state layout": self.state.layout_hash,
        }


def _refuse_what_cannot_work(model: torch.nn.Module, mode: str) -> None:
    if mode not in _GRADIENTS:
        raise BadSetting(f"mode is {mode!r}, not one of {', '.join(_GRADIENTS)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise NothingToReduce("the model has no parameter that requires a gradient")


def _count_shards(shards: int | None, data: ElasticSampler | None, *, at_least: int) -> int:
    """K, as asked for or as the data has it. Raises BadSetting."""
    found = data.ledger.shards if data is not None else at_least
    count = found if shards is None else shards
    if count < 1:
        raise BadSetting(
            f"shards is {count}, but a step needs at least one",
            remedy="Pass shards=K or data=ElasticSampler(..., shards=K) to ftcore.Manager.",
        )
    if data is not None and data.ledger.shards != count:
        raise BadSetting(f"shards is {count}, but data has {data.ledger.shards}")
    return count


def _show(text: str) -> None:
    event(log, "lighthouse.notice", text=text)
