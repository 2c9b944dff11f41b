"""Stacks of py-spy and faulthandler, and which rank they belong to."""

from flightrec.stacks import looks_like_stack, read_stacks

PYSPY = """Process 4021: python train.py
Python v3.11.2 (/usr/bin/python3.11)

Thread 4021 (idle): "MainThread"
    read_shard (data/loader.py:88)
    __next__ (data/loader.py:31)
    <module> (train.py:12)
Thread 4077 (active): "pt_autograd_0"
    run (torch/autograd/graph.py:825)
"""
FAULT = """Thread 0x00007f9c1 [watcher] (most recent call first):
  File "threading.py", line 320 in wait

Current thread 0x00007f9c2 (most recent call first):
  File "train.py", line 7 in step
  File "train.py", line 12 in <module>
"""


def test_a_pyspy_text_gives_the_frames_of_each_thread_innermost_first():
    main, autograd = read_stacks(PYSPY, source="pyspy_rank_3.txt")
    assert (main.rank, main.thread) == (3, "MainThread")
    assert [f.name for f in main.frames] == ["read_shard", "__next__", "<module>"]
    assert str(main.frames[0]) == "data/loader.py:88 in read_shard"
    assert autograd.thread == "pt_autograd_0"


def test_a_process_id_tells_the_rank_when_the_name_does_not():
    assert [s.rank for s in read_stacks(PYSPY, source="stacks.txt", pids={4021: 5})] == [5, 5]
    assert read_stacks(PYSPY, source="stacks.txt") == ()


def test_many_ranks_in_one_text_are_told_apart_by_headings():
    text = "== rank 0 ==\n" + PYSPY + "== rank 1 ==\n" + FAULT
    assert [(s.rank, s.thread) for s in read_stacks(text)] == [
        (0, "MainThread"),
        (0, "pt_autograd_0"),
        (1, "watcher"),
        (1, "MainThread"),
    ]


def test_faulthandler_marks_the_current_thread():
    stacks = read_stacks(FAULT, source="rank2.stack")
    assert str(stacks[1].frames[0]) == "train.py:7 in step"


def test_stacks_are_recognised():
    assert looks_like_stack(PYSPY)
    assert looks_like_stack(FAULT)
    assert not looks_like_stack("step 1 loss 3.2")
