"""Makes valid dumps of a made-up job with a chosen fault, for tests and drills."""

from __future__ import annotations

from flightrec.synth.job import Job, Layout
from flightrec.synth.world import Fault
from flightrec.synth.write import synthesize, write_dumps

__all__ = ["Fault", "Job", "Layout", "synthesize", "write_dumps"]
