"""The command `flightrec`."""

from __future__ import annotations

import json
import shutil

import click

from flightrec.cli import EXIT_CODE, FAULT, HEALTHY, Case, FlightGroup, examine, is_colored, write

paths = click.argument("paths", nargs=-1, required=True, metavar="PATH...")
quorum = click.option("--quorum", type=int, help="torchft: read this quorum folder, not the last.")
color = click.option("--color/--no-color", default=None, help="Default: on a terminal.")
named = click.Path(exists=True)


@click.group(cls=FlightGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """Reads what PyTorch's flight recorder dumped and names the guilty rank.

    PATH is a dump, a folder, a glob, an archive or a URL; logs, NCCL RAS answers and py-spy stacks
    that lie in a folder are used too. Without any dump, watchdog lines in logs decide alone.

    Exit codes: 0 healthy, 1 fault found, 2 undecided, 3 unusable input, 4 wrong usage.
    """


@main.command()
@paths
@quorum
@click.option("--logs", multiple=True, type=named, help="Logs of the ranks: files or folders.")
@click.option("--ras", multiple=True, type=named, help="What `ncclras` printed, text or JSON.")
@click.option("--stacks", multiple=True, type=named, help="What py-spy or faulthandler printed.")
@click.option("--exits", multiple=True, type=named, help="How processes ended: JSON or lines.")
@click.option("--note", "notes", multiple=True, help="A sentence to show with the verdict.")
@click.option("--world-size", type=click.IntRange(1), help="Ranks of the job, if logs do not tell.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page that opens offline.")
@click.option("--perfetto", type=click.Path(dir_okay=False), help="Write a trace (.json.gz).")
@click.option("--matrix", is_flag=True, help="Print ranks × calls too.")
@color
def analyze(
    paths: tuple[str, ...],
    quorum: int | None,
    logs: tuple[str, ...],
    ras: tuple[str, ...],
    stacks: tuple[str, ...],
    exits: tuple[str, ...],
    notes: tuple[str, ...],
    world_size: int | None,
    as_json: bool,
    html: str | None,
    perfetto: str | None,
    matrix: bool,
    color: bool | None,
) -> int:
    """Say whether anything is wrong, which rank caused it, where, and why."""
    from flightrec.evidence import collect

    beside = collect(paths, logs=logs, ras=ras, stacks=stacks, exits=exits, notes=notes)
    case = examine(paths, beside, quorum=quorum, world_size=world_size)
    _print(case, as_json=as_json, matrix=matrix, color=is_colored(color))
    _write_files(case, html=html, perfetto=perfetto)
    return EXIT_CODE[case.report.verdict]


def _print(case: Case, *, as_json: bool, matrix: bool, color: bool) -> None:
    from flightrec.render.text import verdict_text

    width = max(60, min(100, shutil.get_terminal_size((80, 24)).columns))
    if as_json:
        click.echo(json.dumps(case.report.to_json(), indent=1, sort_keys=True))
    else:
        click.echo(verdict_text(case.report, color=color, width=width), nl=False, color=color)
    if matrix:
        from flightrec.render.board import layout
        from flightrec.render.matrix import matrix_text

        text = matrix_text(case.records, layout(case.records, case.report), color=color)
        click.echo("\n" + text, nl=False, err=as_json, color=color)


def _write_files(case: Case, *, html: str | None, perfetto: str | None) -> None:
    if html:
        from flightrec.render.board import layout
        from flightrec.render.page import page

        board = layout(case.records, case.report)
        write(html, page(case.records, case.report, case.beside.evidence, board))
    if perfetto:
        from flightrec.render.perfetto import write_perfetto

        write_perfetto(perfetto, case.records, case.report)


@main.command()
@click.argument("rank", type=click.IntRange(0))
@paths
@quorum
@click.option("--last", type=click.IntRange(1), default=30, show_default=True, help="Calls.")
@click.option("--all", "everything", is_flag=True, help="All calls in the dump.")
@click.option("--group", default="", help="Only this group, by name or description.")
@click.option("--op", default="", help="Only operations whose name holds this text.")
@click.option("--stacks", is_flag=True, help="The whole stack of each call.")
def show(
    rank: int,
    paths: tuple[str, ...],
    quorum: int | None,
    last: int,
    everything: bool,
    group: str,
    op: str,
    stacks: bool,
) -> int:
    """Print the last calls of RANK, whole."""
    import flightrec
    from flightrec.show import show_rank

    records = flightrec.load(paths, quorum=quorum)
    kept = None if everything else last
    click.echo(show_rank(records, rank, last=kept, group=group, op=op, stacks=stacks), nl=False)
    return HEALTHY


@main.command()
@click.argument("left")
@click.argument("right")
@click.option("--ranks", metavar="A,B", help="Compare rank A of LEFT with rank B of RIGHT.")
def diff(left: str, right: str, ranks: str | None) -> int:
    """Find the first call in which two dumps differ: of two ranks, or of one rank in two runs.

    Exit code 0: the same calls; 1: a difference.
    """
    from flightrec.diff import diff_paths

    text, is_same = diff_paths(left, right, ranks=ranks)
    click.echo(text, nl=False)
    return HEALTHY if is_same else FAULT


@main.command()
@paths
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="One small file.")
def digest(paths: tuple[str, ...], out: str) -> int:
    """Put all that the verdict needs of this host's dumps into one small file.

    `flightrec analyze` takes digests and dumps, mixed, and says the same as from the dumps alone.
    """
    from flightrec.loading import digest_of

    data, count = digest_of(paths)
    write(out, data)
    click.echo(f"{count} dumps in {out}: {len(data) / count / 1024:.1f} KiB each")
    return HEALTHY


@main.command()
@paths
@click.option("--out", required=True, type=click.Path(file_okay=False), help="A new folder.")
def anonymize(paths: tuple[str, ...], out: str) -> int:
    """Copy dumps and logs without names, for a bug report: the verdict stays the same."""
    from flightrec.anonymize import anonymize_paths

    written = anonymize_paths(paths, out)
    click.echo(f"{len(written)} files in {out}. Look at them before you publish them.")
    return HEALTHY


@main.command()
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--dp", type=click.IntRange(1), default=2, show_default=True, help="Data parallel.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True, help="Expert groups.")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True)
@click.option("--fault", "faults", multiple=True, metavar="KIND:RANK[:STEP[:CALL]]")
@click.option("--ring", type=click.IntRange(1), default=2000, show_default=True, help="Entries.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--batched-p2p", is_flag=True, help="Stages send and receive in batches.")
@click.option("--timing", is_flag=True, help="As with TORCH_NCCL_ENABLE_TIMING=1.")
@click.option("--stacks/--no-stacks", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Write JSON dumps instead of pickles.")
def synth(
    out: str,
    dp: int,
    tp: int,
    pp: int,
    ep: int,
    steps: int,
    faults: tuple[str, ...],
    ring: int,
    seed: int,
    batched_p2p: bool,
    timing: bool,
    stacks: bool,
    as_json: bool,
) -> int:
    """Write valid dumps of a made-up job with a chosen fault into OUT, for tests and drills.

    KIND is one of the kinds of a report, like never_issued, died, size_mismatch, straggler.
    """
    from flightrec.synth import Job, Layout, synthesize, write_dumps
    from flightrec.synth.ask import parse_faults

    job = Job(layout=Layout(dp=dp, tp=tp, pp=pp, ep=ep), steps=steps, is_batched_p2p=batched_p2p)
    asked = parse_faults(faults, job)
    options = {"seed": seed, "ring": ring}
    dumps = synthesize(job, asked, with_stacks=stacks, with_timing=timing, **options)
    write_dumps(out, dumps, as_json=as_json)
    click.echo(f"{len(dumps)} dumps of {job.layout.world} ranks in {out}")
    return HEALTHY


@main.command()
@click.argument("pipes", metavar="PREFIX")
@click.option("--dumps", metavar="PREFIX", help="Prefix of the dump files, if it differs.")
@click.option("--out", type=click.Path(file_okay=False), help="Keep what is collected here.")
@click.option("--wait-s", default=15.0, show_default=True, help="How long to wait for dumps.")
@click.option("--ras", metavar="HOST:PORT", help="Ask NCCL's RAS service too (localhost:28028).")
@click.option("--every-s", type=float, help="Repeat until a hang is seen twice in a row.")
@click.option("--looks", type=click.IntRange(1), help="End after so many looks (default: never).")
@click.option("--note", "notes", multiple=True, help="A sentence to show with the verdict.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page that opens offline.")
@color
def watch(
    pipes: str,
    dumps: str | None,
    out: str | None,
    wait_s: float,
    ras: str | None,
    every_s: float | None,
    looks: int | None,
    notes: tuple[str, ...],
    as_json: bool,
    html: str | None,
    color: bool | None,
) -> int:
    """Make the local ranks of a running job dump now, and say who hangs and why.

    PREFIX<rank>.pipe are the pipes: TORCH_NCCL_DEBUG_INFO_PIPE_FILE, or flightrec.dump_on_request.
    """
    from flightrec.watch import look_at

    case = look_at(
        pipes, dumps, out=out, wait_s=wait_s, ras=ras, notes=notes, every_s=every_s, looks_max=looks
    )
    _print(case, as_json=as_json, matrix=False, color=is_colored(color))
    _write_files(case, html=html, perfetto=None)
    return EXIT_CODE[case.report.verdict]


if __name__ == "__main__":
    main()
