"""Draw the loss curves of both runs and where groups were killed. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from ftcore.base.errors import FtError
from ftcore.demo.processes import Run


class NoMatplotlib(FtError):
    remedy = "Install it with `pip install 'ftcore[plot]'`, or leave --plot out."


def draw(failed: Run, unfailed: Run, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("matplotlib, which --plot needs, is not installed") from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for run, style, label in ((unfailed, "-", "no failure"), (failed, "--", "with kill -9")):
        losses = sorted(run.losses.items())
        axes.plot(*zip(*losses, strict=True), style, label=label, linewidth=2)
    for killed in failed.killed:
        axes.axvline(killed.kill.step, color="tab:red", alpha=0.6)
        axes.annotate(
            f"{killed.kill.group} killed",
            (killed.kill.step, axes.get_ylim()[1]),
            xytext=(4, -14),
            textcoords="offset points",
            color="tab:red",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, mean over all shards")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
