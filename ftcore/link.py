"""The trainer's side of the socket to its manager: ask, vote, and hear of aborts at once."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ftcore.base.log import event
from ftcore.base.machine import this_machine
from ftcore.errors import GroupStopped, ManagerLost
from ftcore.start import ManagerAddress
from ftcore.wire import ftcore_pb2 as pb
from ftcore.wire.codec import quorum_from_pb
from ftcore.wire.frames import FrameSocket, tune_tcp
from ftcore.wire.messages import Quorum

log = logging.getLogger("ftcore")

CONNECT_TIMEOUT_S = 60.0
_GONE = "the manager process of this replica group is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The permission to run one step, and how far to go on without asking."""

    step: int
    quorum: Quorum
    must_heal: bool
    may_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a step, and the permission for the next one if it is there already."""

    is_committed: bool
    reason: str
    grant: Grant | None
    must_recompute: bool = False


def _connect(manager: ManagerAddress, silent_limit_s: float) -> FrameSocket:
    """Over a unix socket on the manager's machine, over TCP from others."""
    try:
        if manager.machine == this_machine():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect("\0" + manager.unix)
        else:
            host, _, port = manager.tcp.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            sock.settimeout(None)
            tune_tcp(sock, silent_limit_s=silent_limit_s)
    except OSError as error:
        raise ManagerLost(
            f"the manager at {manager.tcp or manager.unix} cannot be reached: {error}"
        ) from error
    return FrameSocket(sock)


class Link:
    """One rank's connections to its manager: one to ask on, one on which it is told."""

    def __init__(
        self,
        manager: ManagerAddress,
        hello: pb.RankHello,
        *,
        silent_limit_s: float,
        stuck_limit_s: float,
        abort: Callable[[int, str], None],
        notice: Callable[[str], None],
    ) -> None:
        self._abort, self._notice = abort, notice
        self.stopped: pb.Stop | None = None
        self._unanswered = 0  # votes on the way
        self._may_run = 0  # what the newest answer allowed
        self._stuck_limit_s, self._has_noticed = stuck_limit_s, threading.Event()
        self._asks = _connect(manager, silent_limit_s)
        self._pushes = _connect(manager, silent_limit_s)
        for is_push, sock in ((False, self._asks), (True, self._pushes)):
            hello.token, hello.is_push = manager.token, is_push
            sock.send(pb.FromRank(hello=hello).SerializeToString())
            self._receive(sock)
        self._thread = threading.Thread(target=self._listen, name="ftcore-link", daemon=True)
        self._thread.start()

    def wait_grant(self, until: int) -> Grant:
        """Say that this rank stands at a step boundary; return when it may run a step."""
        while self._unanswered:
            self._decision()
        self._may_run = 0
        self._send(pb.FromRank(ready=pb.Ready(until=until)))
        return _grant(self._receive(self._asks).go)

    def vote(
        self,
        grant: Grant,
        *,
        is_ok: bool,
        reason: str,
        until: int,
        group_s: float = 0.0,
        heal_s: float = 0.0,
        held_s: float = 0.0,
        is_torn: bool = False,
        must_stop: bool = False,
        must_recompute: bool = False,
        slowness: float = 0.0,
    ) -> Verdict:
        """Vote on a step; return what all ranks together decided. `group_s`, `heal_s`, `held_s`:
        how long this rank took to build the process group and to heal, and how long the heals of
        others held it. `is_torn`: its state has to be healed. `must_stop`: its group cannot go on.
        `must_recompute`: what its group has computed for this step is not to be trusted.

        A rank that is its whole group knows what a yes will lead to. While it may run on, it does
        not wait for the answer, but for that to the vote before.
        """
        vote = pb.Vote(step=grant.step, is_ok=is_ok, reason=reason[:4000], until=until)
        vote.group_s, vote.heal_s, vote.held_s = group_s, heal_s, held_s
        vote.is_torn, vote.must_stop, vote.slowness = is_torn, must_stop, slowness
        vote.must_recompute = must_recompute
        self._send(pb.FromRank(vote=vote))
        self._unanswered += 1
        while self._unanswered > 1:
            self._may_run = self._decision().may_run
        following = grant.step + 1
        if is_ok and following <= max(grant.may_run, self._may_run) and following < until:
            return Verdict(is_committed=True, reason="", grant=_following(grant, self._may_run))
        decision = self._decision()
        self._may_run = max(self._may_run, decision.may_run)
        if decision.HasField("go"):
            return Verdict(is_committed=decision.is_committed, reason="", grant=_grant(decision.go))
        next_grant = None
        if decision.is_committed and following <= decision.may_run and following < until:
            next_grant = _following(grant, decision.may_run)
        return Verdict(
            is_committed=decision.is_committed,
            reason=decision.reason,
            grant=next_grant,
            must_recompute=decision.must_recompute,
        )

    def _decision(self) -> pb.Decision:
        self._unanswered -= 1
        return self._receive(self._asks).decision

    def heal_progress(self, bytes_done: int, bytes_total: int) -> None:
        progress = pb.HealProgress(bytes_done=bytes_done, bytes_total=bytes_total)
        self._send(pb.FromRank(heal_progress=progress))

    def healed(self, lineage: int) -> None:
        self._send(pb.FromRank(healed=pb.Healed(lineage=lineage)))

    def leave(self, reason: str) -> None:
        """Ask to leave in good order. May be called from a signal handler."""
        self._send(pb.FromRank(leave=pb.Leave(reason=reason)))

    def close(self, reason: str) -> None:
        self._has_noticed.set()
        try:
            self._send(pb.FromRank(bye=pb.Bye(reason=reason)))
        except (GroupStopped, ManagerLost):
            pass
        self._pushes.shutdown()
        self._thread.join()
        self._pushes.close()
        self._asks.close()

    def _send(self, message: pb.FromRank) -> None:
        try:
            self._asks.send(message.SerializeToString())
        except OSError as error:
            raise self._lost() from error

    def _receive(self, sock: FrameSocket) -> pb.ToRank:
        payload = sock.receive()
        if payload is None:
            raise self._lost()
        message = pb.ToRank.FromString(payload)
        if message.WhichOneof("kind") == "stop":
            self.stopped = message.stop
            raise self._lost()
        return message

    def _lost(self) -> GroupStopped | ManagerLost:
        """Why the manager does not answer: it said so on either connection, or it died."""
        self._has_noticed.set()
        deadline = time.monotonic() + 0.5
        while self.stopped is None and self._is_listening() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.stopped is None:
            return ManagerLost(_GONE)
        stop = self.stopped
        return GroupStopped(
            stop.what, remedy=stop.remedy, is_clean=stop.is_clean, compare_with=stop.compare_with
        )

    def _is_listening(self) -> bool:
        thread = getattr(self, "_thread", None)
        return thread is not None and thread.is_alive()

    def _listen(self) -> None:
        """Runs on a thread of its own: an abort must reach a trainer that waits in a collective."""
        while (payload := self._pushes.receive()) is not None:
            message = pb.ToRank.FromString(payload)
            match message.WhichOneof("kind"):
                case "abort":
                    self._abort(message.abort.quorum_id, message.abort.reason)
                case "stop":
                    self.stopped = message.stop
                    self._abort(0, message.stop.what)
                case "notice":
                    self._notice(message.notice.text)
        if self.stopped is None and not self._has_noticed.is_set():
            self._abort(0, _GONE)
        if self.stopped is None or not self.stopped.is_clean:
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """A rank of a lost group may wait for a lost rank in a collective of its own, which nobody
        aborts. Whoever restarts the group waits for this process."""
        if self._has_noticed.wait(self._stuck_limit_s):
            return
        why = self.stopped.what if self.stopped is not None else _GONE
        event(log, "rank.ended", reason=why, stuck_s=self._stuck_limit_s, level=logging.ERROR)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def _grant(go: pb.Go) -> Grant:
    return Grant(
        step=go.step,
        quorum=quorum_from_pb(go.quorum),
        must_heal=go.must_heal,
        may_run=go.may_run,
    )


def _following(grant: Grant, may_run: int) -> Grant:
    """The next step under the same quorum."""
    return replace(grant, step=grant.step + 1, must_heal=False, may_run=max(grant.may_run, may_run))
