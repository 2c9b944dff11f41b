"""NCCL RAS answers: both forms, the torn, and a live query."""

import contextlib
import socket
import threading

import pytest

from flightrec.errors import BadEvidence
from flightrec.ras import looks_like_ras, query_ras, read_ras
from tests.flightrec import real


def answer(name, form):
    return real.real_sets()[name]["ras"][f"ras_{form}.txt"]


def missing(states):
    return [s.rank for s in states if s.is_missing]


@pytest.mark.parametrize("form", ["text", "json"])
def test_both_forms_say_who_is_missing_and_who_saw_an_error(form):
    states = read_ras(answer("kill9_ras", form))
    assert missing(states) == [2, 3]
    assert [s.rank for s in states if s.error.lower() == "remote process error"] == [0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_both_forms_show_the_rank_with_fewer_calls(form):
    counts = {
        s.rank: s.counts.get("AllReduce") for s in read_ras(answer("hang_missing_call", form))
    }
    assert counts[1] == 6
    assert all(count == 10 for rank, count in counts.items() if rank != 1)


def test_a_healthy_answer_names_nobody():
    states = read_ras(answer("device_busy", "json"))
    assert len(states) == 4
    assert not missing(states)
    assert read_ras(answer("device_busy", "text")) == ()


def test_dead_processes_are_found_by_their_pid():
    text = """
#0-0 (cf264af5) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 21 -- GPU 5 managed by process 3487 on node 172.16.64.213

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487 on node 172.16.64.213 managing GPU 5
"""
    (state,) = read_ras(text)
    assert (state.rank, state.is_missing, state.is_dead) == (21, True, True)


def test_the_short_form_lists_missing_ranks_in_one_line():
    text = "#1-0 (cf26) INCOMPLETE\n  Missing communicator data\n  The missing ranks: 4, 21\n"
    assert missing(read_ras(text)) == [4, 21]


def test_a_torn_answer_is_one_clear_error():
    with pytest.raises(BadEvidence, match="cut off"):
        read_ras(answer("kill9_ras", "json")[:900], source="ras_json.txt")


@pytest.mark.parametrize("form", ["text", "json"])
def test_answers_are_recognised_and_other_texts_are_not(form):
    assert looks_like_ras(answer("kill9_ras", form))
    assert not looks_like_ras("step 1 loss 3.2")


def test_a_live_service_is_asked_for_json():
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def serve():
            connection, _ = server.accept()
            with connection:
                while b"STATUS" not in b"".join(asked):
                    asked.append(connection.recv(4096))
                connection.sendall(answer("kill9_ras", "json").encode())

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        text = query_ras("127.0.0.1", server.getsockname()[1])
    assert b"SET FORMAT json" in b"".join(asked)
    assert missing(read_ras(text)) == [2, 3]
