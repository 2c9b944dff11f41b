"""Measure flightrec beside torchfrtrace on the same dumps: `python -m tests.bench.flightrec`.

`--peer-full` also gives torchfrtrace the largest inputs (minutes, over 3 GiB). The peer needs torch
and tabulate. Figures are wall seconds and the peak memory of all processes of the tool together.
"""

import argparse
import json
import re
import resource
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "flightrec")]
import flightrec  # noqa: E402
from flightrec.loading import digest_of  # noqa: E402

SETS = ROOT / "tests" / "flightrec" / "sets"
ANALYZE = (
    "import sys, flightrec; r = flightrec.analyze(flightrec.load(sys.argv[1:])); print(r.summary)"
)


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer-full", action="store_true")
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--healthy", type=int, default=200)
    given = options.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"load average at the start: {load}; CPUs: {len(__import__('os').sched_getaffinity(0))}")
    with tempfile.TemporaryDirectory() as folder:
        scale(Path(folder), given.peer_full)
        two_levels(Path(folder))
        sets(Path(folder) / "sets")
        random_jobs(Path(folder) / "jobs", given.jobs, given.healthy)


def scale(folder, peer_full):
    print("| ranks x entries | tool | wall s | CPU s | peak MiB |\n|---|---|---|---|---|")
    for ranks, entries in ((64, 2000), (1024, 2000), (64, 20000)):
        target = folder / f"{ranks}x{entries}"
        make(target, ranks, entries)
        row("flightrec", ranks, entries, [sys.executable, "-c", ANALYZE, str(target)])
        if peer_full or ranks * entries < 200_000:
            peer = "torch.distributed.flight_recorder.fr_trace"
            row("torchfrtrace", ranks, entries, [sys.executable, "-m", peer, str(target)])


def row(tool, ranks, entries, command):
    seconds, cpu, peak = measure(command)
    print(f"| {ranks} x {entries} | {tool} | {seconds:.1f} | {cpu:.1f} | {peak:.0f} |", flush=True)


def measure(command):
    """Wall and CPU seconds, and the highest sum of resident memory of all its processes, in MiB."""
    start, before, peak = time.perf_counter(), cpu_seconds(), 0
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    done = threading.Event()
    threading.Thread(target=lambda: (child.wait(), done.set()), daemon=True).start()
    while not done.wait(0.05):
        peak = max(peak, sum(map(resident, tree(child.pid))))
    return time.perf_counter() - start, cpu_seconds() - before, peak / 1024


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    # Children are started by threads, so every thread is asked.
    for task in Path(f"/proc/{pid}/task").glob("*") if Path(f"/proc/{pid}/task").exists() else ():
        try:
            children += (task / "children").read_text().split()
        except OSError:
            continue
    return [pid, *{p for child in set(children) for p in tree(int(child))}]


def resident(pid):
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+)", text)
    return int(found[1]) if found else 0


def two_levels(folder):
    """A digest for each host of 8 ranks, then their merge: of the copies of one real dump, and of
    a made-up job in which every rank has groups, calls and times of its own."""
    from flightrec.synth import Job, Layout, synthesize, write_dumps

    job = Job(layout=Layout(dp=4, tp=4, pp=8), steps=40, layers=8, microbatches=2)
    write_dumps(str(folder / "made"), synthesize(job, seed=1))
    print("| ranks x entries | digest, KiB a rank | digest, CPU ms a rank | merge, CPU ms a rank |")
    print("|---|---|---|---|")
    for name in ("1024x2000", "made"):
        files = sorted((folder / name).iterdir())
        target = folder / f"{name}-digests"
        target.mkdir()
        before, size = time.process_time(), 0
        for at in range(0, len(files), 8):
            data, _ = digest_of(list(map(str, files[at : at + 8])), processes=1)
            (target / f"host{at:05d}.frdigest").write_bytes(data)
            size += len(data)
        spent = (time.process_time() - before) / len(files) * 1e3
        _, merge, peak = measure([sys.executable, "-c", ANALYZE, str(target)])
        each = merge / len(files) * 1e3
        entries = sum(len(r.columns) for r in flightrec.load([str(target)]).ranks.values())
        what = f"{len(files)} x {entries // len(files):,}"
        print(f"| {what} | {size / len(files) / 1024:.2f} | {spent:.1f} | {each:.2f} |", end=" ")
        print(f"whole merge {merge:.1f} CPU s, {peak:.0f} MiB", flush=True)


def make(folder, ranks, entries):
    """Dumps in the very bytes of a real one (a full NCCL buffer), for more ranks and entries."""
    folder.mkdir(parents=True)
    with tarfile.open(SETS / "nccl.tar.gz") as archive:
        raw = archive.extractfile("full_buffer_world1/dumps/nccl_trace_rank_0").read()
    members = str(list(range(ranks))).encode()
    raw = raw.replace(b"X\x03\x00\x00\x00[0]", b"X" + struct.pack("<I", len(members)) + members)
    first, last = raw.index(b"}(h\x10"), raw.rindex(b"}(h\x10")
    end = raw.rindex(b"hC\x89u") + 4  # behind the last entry's items
    if entries > 2000:
        body = raw[first:last] * (entries // 2000)
        raw = raw[:first] + renumbered(body) + raw[end:]
    for rank in range(ranks):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(raw)


def renumbered(body):
    """Give the repeated entries growing sequence numbers: M is a two-byte, J a four-byte int."""
    count = iter(range(200, 1 << 30))
    return re.sub(
        rb"(?s)h\x32(?:M..|K.)", lambda _: b"h\x32J" + struct.pack("<i", next(count)), body
    )


def sets(folder):
    """Right verdicts (exactly the culprits, no innocent) on the real sets, from dumps alone."""
    right, peer, count = 0, 0, 0
    for name in ("nccl", "gloo"):
        with tarfile.open(SETS / f"{name}.tar.gz") as archive:
            archive.extractall(folder / name, filter="data")
        for case in sorted((folder / name).iterdir()):
            truth = json.loads((case / "truth.json").read_text())
            one = truth.get("culprit")
            wanted = set(truth.get("culprits", [] if one is None else [one]))
            report = flightrec.analyze(flightrec.load([str(case / "dumps")]))
            count += 1
            right += {c.rank for c in report.culprits} == wanted
            peer += peer_names(case / "dumps") == wanted
    print(f"right verdicts from dumps alone: flightrec {right} of {count}, torchfrtrace {peer}")


def peer_names(dumps):
    """The ranks that torchfrtrace blames; None: it refuses, crashes or cannot decide."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    found = subprocess.run(
        [*command, "-p", prefix(dumps), str(dumps)], capture_output=True, text=True, cwd=ROOT
    )
    text = found.stdout + found.stderr
    if found.returncode:
        return None
    blamed = {int(rank) for rank in re.findall(r"[Cc]ulprit rank (\d+)", text)}
    for ranks in re.findall(r"missing ranks:? \{([\d, ]*)\}", text):
        blamed |= {int(rank) for rank in re.findall(r"\d+", ranks)}
    return blamed


def prefix(dumps):
    return re.sub(r"\d+$", "", min(dumps.iterdir()).name)


def random_jobs(folder, jobs, healthy):
    from random_cases import random_case, without_some

    from flightrec.synth import synthesize, write_dumps

    named = right = first = alarms = 0
    for seed in range(jobs):
        job, faults, options, rng = random_case(seed)
        dumps = synthesize(job, faults, **options)
        dumps = without_some(dumps, faults, rng) if rng.random() < 0.2 else dumps
        write_dumps(str(folder / str(seed)), dumps)
        report = flightrec.analyze(flightrec.load([str(folder / str(seed))]))
        guilty = {fault.rank for fault in faults}
        named += len(report.culprits)
        right += sum(1 for c in report.culprits if c.rank in guilty)
        first += bool(report.culprits) and report.culprits[0].rank in guilty
    for seed in range(100_000, 100_000 + healthy):
        job, _, options, _ = random_case(seed, healthy=True)
        write_dumps(str(folder / str(seed)), synthesize(job, **options))
        report = flightrec.analyze(flightrec.load([str(folder / str(seed))]))
        alarms += report.verdict != "healthy"
    print(f"random faults: {jobs} jobs, precision {right / named:.3f}, top-1 {first / jobs:.3f}")
    print(f"random healthy jobs: {healthy}, alarms {alarms}")


if __name__ == "__main__":
    main()
