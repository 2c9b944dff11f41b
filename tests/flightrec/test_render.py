"""What people see: a screen of text, a matrix, a page in a real browser, a Perfetto trace."""

import dataclasses
import gzip
import json
import os
import re
import shutil
import subprocess

import pytest

from flightrec.model import (
    STATE_COMPLETED,
    Evidence,
    Exit,
    Finding,
    Group,
    Kind,
    RankRecord,
    Records,
    Report,
    Verdict,
)
from flightrec.render import words
from flightrec.render.board import layout
from flightrec.render.matrix import matrix_text
from flightrec.render.page import page
from flightrec.render.perfetto import write_perfetto
from flightrec.render.text import verdict_text
from tests.flightrec import jobs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("CI"), reason="needs the Debian package chromium"
)


def letters(board, group=0):
    return {row.rank: row.letters for row in board.groups[group].rows}


def page_of(records, report, evidence=None):
    return page(records, report, evidence or Evidence(), layout(records, report))


def in_browser(html, folder, *flags):
    """The page as the browser made it of `html`, and what it said on its console."""
    path = folder / "page.html"
    path.write_text(html)
    ran = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", "--virtual-time-budget=3000", *flags),
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


def test_the_verdict_fits_on_one_screen_whatever_the_number_of_ranks():
    for world in (2, 4, 1024):
        records = jobs.stuck_job(world)
        text = verdict_text(jobs.report_of(records))
        assert text.startswith("FAULT  Rank 1 never issued all_reduce #21")
        assert len(text.splitlines()) <= 24
        assert max(map(len, text.splitlines())) <= 80


def test_many_culprits_still_fit_on_one_screen():
    report = jobs.report_of(jobs.stuck_job(64))
    many = tuple(dataclasses.replace(report.culprits[0], rank=r) for r in range(40))
    text = verdict_text(dataclasses.replace(report, culprits=many, consequences=()))
    assert "ranks 1-39" in text
    assert len(text.splitlines()) <= 24


def test_an_undecided_verdict_says_what_is_lacking():
    report = Report(verdict=Verdict.UNDECIDED, summary="Unclear.", lacking=("dumps of rank 3",))
    assert "lacking    dumps of rank 3" in verdict_text(report)


def test_every_kind_has_words():
    assert set(words.KIND) == set(Kind)


def test_ranks_are_named_briefly():
    assert words.spans([5, 1, 2, 3, 9, 10]) == "1-3, 5, 9, 10"
    assert words.ranks([4]) == "rank 4"
    assert words.ranks([]) == "no rank"
    assert len(words.spans(range(0, 2000, 2))) < 60


def test_the_matrix_shows_where_each_rank_stands():
    records = jobs.stuck_job(4)
    text = matrix_text(records, layout(records, jobs.report_of(records)))
    assert re.search(r"ranks 0, 2, 3 +·{20}WW", text)
    assert re.search(r"rank 1 +·{20}$", text, re.MULTILINE)
    assert "first open: #21 all_reduce [1024] Float" in text


def test_a_rank_without_a_dump_has_a_row_of_question_marks():
    records = jobs.stuck_job(4, missing=(3,))
    assert letters(layout(records, jobs.report_of(records)))[3] == "x" * 22


def test_the_columns_are_chosen_around_the_call_of_the_verdict():
    records = jobs.stuck_job(4, done=500, ahead=300)
    board = layout(records, jobs.report_of(records, seq=501))
    assert 501 in board.groups[0].seqs
    assert len(board.groups[0].seqs) <= 96


def test_a_ring_that_wrapped_shows_what_is_gone():
    records = jobs.stuck_job(2)
    late = jobs.columns([(0, s, 0, 0, 0, STATE_COMPLETED, s) for s in range(15, 21)])
    wrapped = RankRecord(rank=1, source="r", library="nccl", columns=late, first_record_id=14)
    records = dataclasses.replace(records, ranks={**records.ranks, 1: wrapped})
    assert letters(layout(records, jobs.report_of(records)))[1].startswith("o" * 14 + "c")


def test_a_call_unlike_the_others_is_marked():
    records = jobs.stuck_job(4)
    odd = jobs.columns([(0, s, 0, int(s == 5), 0, STATE_COMPLETED, s) for s in range(1, 21)])
    record = dataclasses.replace(records.ranks[2], columns=odd)
    records = dataclasses.replace(records, ranks={**records.ranks, 2: record})
    assert letters(layout(records, jobs.report_of(records)))[2][4] == "C"


def test_a_closed_batch_of_sends_is_completed_and_no_collective():
    records = jobs.p2p_batch_job()
    board = layout(records, Report(verdict=Verdict.UNDECIDED, summary="x"))
    assert letters(board, 0)[0] == "c"
    assert letters(board, 1)[0] == "ccw"


def test_the_page_is_the_same_bytes_again_and_needs_nothing_from_the_network():
    records = jobs.stuck_job(4)
    html = page_of(records, jobs.report_of(records))
    assert html == page_of(records, jobs.report_of(records))
    assert "http:" not in html.replace("http-equiv", "")
    assert "https:" not in html


def test_a_name_in_a_dump_cannot_become_markup():
    records = jobs.stuck_job(2)
    evil = tuple(Group(name="</script><img src=x>", desc="", ranks=g.ranks) for g in records.groups)
    records = dataclasses.replace(records, groups=evil)
    html = page_of(records, jobs.report_of(records))
    assert "</script><img" not in html


def test_a_page_of_1024_ranks_stays_small():
    records = jobs.stuck_job(1024, done=200)
    assert len(page_of(records, jobs.report_of(records, seq=201))) < 4_000_000


@needs_chromium
def test_chromium_shows_four_ranks_with_culprit_rows_and_stack(tmp_path):
    records = jobs.stuck_job(4, missing=(3,))
    ends = Evidence(exits=(Exit(rank=1, code=1, error="ValueError: loss is nan"),))
    dom, console = in_browser(page_of(records, jobs.report_of(records), ends), tmp_path)
    assert not console
    assert "never issued the call" in dom
    assert "ValueError: loss is nan" in dom
    assert dom.count('class="row"') == 3  # ranks 0 and 2 alike, 1, and 3 without a dump
    assert "…/home/me/train.py:41 in step" in dom or "/home/me/train.py:41" in dom


@needs_chromium
def test_chromium_folds_1024_ranks_into_two_lines(tmp_path):
    records = jobs.stuck_job(1024, guilty=700)
    html = page_of(records, jobs.report_of(records, guilty=700))
    dom, console = in_browser(html, tmp_path)
    assert not console
    assert dom.count('class="row"') == 2
    assert "1023: 0-699, 701-1023" in dom


@needs_chromium
def test_chromium_finds_a_rank_by_search_in_a_page_of_1024(tmp_path):
    records = jobs.stuck_job(1024, guilty=700)
    html = page_of(records, jobs.report_of(records, guilty=700)).replace(
        "</body>",
        "<script>addEventListener('load', () => { const s = document.getElementById('search');"
        "s.value = '690-702'; s.dispatchEvent(new Event('input')); });</script></body>",
    )
    dom, console = in_browser(html, tmp_path)
    assert not console
    assert "13 of 1024 ranks" in dom


@needs_chromium
def test_chromium_shows_a_verdict_from_logs_alone(tmp_path):
    records = Records(ranks={}, groups=())
    report = Report(
        verdict=Verdict.UNDECIDED, summary="Unclear.", findings=(Finding(code="a", text="Note."),)
    )
    dom, console = in_browser(page_of(records, report), tmp_path)
    assert not console
    assert "Note." in dom


def test_the_perfetto_trace_has_a_process_per_rank_and_is_the_same_bytes_again(tmp_path):
    from tests.flightrec.real_dumps import small_job

    records = small_job(tmp_path)
    report = jobs.report_of(jobs.stuck_job(2), seq=2)
    count = write_perfetto(str(tmp_path / "a.json.gz"), records, report)
    write_perfetto(str(tmp_path / "b.json.gz"), records, report)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    events = json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["traceEvents"]
    assert len(events) == count
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1 (culprit)",
    }
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans} >= {"all_reduce #1", "all_reduce #2"}
    assert all(e["dur"] >= 1 for e in spans)
    assert [e["ph"] for e in events if e["ph"] in "sf"] == ["s"]
