"""Records of made-up jobs, as the loader would give them."""

from array import array

from flightrec.model import (
    FLAG_P2P,
    STATE_COMPLETED,
    STATE_SCHEDULED,
    Call,
    Columns,
    Consequence,
    Culprit,
    Frame,
    Group,
    Kind,
    RankRecord,
    Records,
    Report,
    Verdict,
)

CALLS = (
    Call(library="nccl", op="all_reduce", input_sizes=((1024,),), input_dtypes=("Float",)),
    Call(library="nccl", op="broadcast", input_sizes=((8,),), input_dtypes=("Float",)),
    Call(library="nccl", op="send", own=0, peer=1, input_sizes=((8,),)),
    Call(library="nccl", op="coalesced"),
)
SITES = (
    (
        Frame(name="all_reduce", filename="/x/site-packages/torch/distributed/c10d.py", line=3),
        Frame(name="step", filename="/home/me/train.py", line=41),
    ),
    (Frame(name="<script>", filename="</script><b>evil.py", line=1),),
)


def columns(rows):
    """Rows of (group, seq, p2p_seq, call, site, flags, created_ns)."""
    by_name = list(zip(*rows, strict=True)) if rows else [()] * 7
    group, seq, p2p, call, site, flags, created = by_name
    return Columns(
        group=array("H", group),
        seq=array("I", seq),
        p2p_seq=array("I", p2p),
        call=array("I", call),
        site=array("I", site),
        flags=array("B", flags),
        created_ns=array("q", created),
        duration_ms=array("f"),
    )


def stuck_job(world, *, guilty=1, done=20, ahead=2, missing=()):
    """All ranks but `guilty` wait in call done + 1 of the default group."""
    group = Group(name="0", desc="default_pg", ranks=tuple(range(world)))
    ranks = {}
    for rank in range(world):
        if rank in missing:
            continue
        last = done if rank == guilty else done + ahead
        rows = [
            (0, s, 0, 0, 0, STATE_COMPLETED if s <= done else STATE_SCHEDULED, s * 10**9 + rank)
            for s in range(1, last + 1)
        ]
        ranks[rank] = RankRecord(
            rank=rank, source=f"rank_{rank}", library="nccl", columns=columns(rows)
        )
    return Records(ranks=ranks, groups=(group,), calls=CALLS, sites=SITES)


def report_of(records, *, guilty=1, seq=21):
    world = len(records.groups[0].ranks)
    culprit = Culprit(
        rank=guilty,
        kind=Kind.NEVER_ISSUED,
        group="default_pg",
        group_ranks=tuple(range(world)),
        seq=seq,
        op="all_reduce",
        where="/home/me/train.py:41 in step",
        confidence=0.97,
        because=(f"{world - 1} ranks wait in it.", "It has nothing outstanding."),
        stack=SITES[0],
    )
    waiting = tuple(
        Consequence(rank=rank, waits_for=(guilty,), group="default_pg", seq=seq, op="all_reduce")
        for rank in range(world)
        if rank != guilty
    )
    return Report(
        verdict=Verdict.FAULT,
        summary=f"Rank {guilty} never issued all_reduce #{seq} of default_pg.",
        culprits=(culprit,),
        consequences=waiting,
        next_steps=(f"Look at what rank {guilty} does.",),
        world_size=world,
        ranks_read=len(records.ranks),
        entries_read=sum(len(r.columns) for r in records.ranks.values()),
    )


def p2p_batch_job():
    """One rank: a batch of two sends that completed, and one send that is open."""
    group = Group(name="0", desc="default_pg", ranks=(0, 1))
    done, open_ = STATE_COMPLETED, STATE_SCHEDULED
    rows = [
        (0, 1, 0, 0, 0, done, 10**9),
        (0, 2, 1, 2, 0, open_ | FLAG_P2P, 2 * 10**9),
        (0, 2, 1, 2, 0, open_ | FLAG_P2P, 2 * 10**9),
        (0, 2, 1, 3, 0, done, 2 * 10**9),
        (0, 2, 2, 2, 0, open_ | FLAG_P2P, 3 * 10**9),
    ]
    record = RankRecord(rank=0, source="rank_0", library="nccl", columns=columns(rows))
    return Records(ranks={0: record}, groups=(group,), calls=CALLS, sites=SITES)
