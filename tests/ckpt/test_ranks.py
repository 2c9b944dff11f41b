"""Several ranks: shared uploads, dead participants, and other world sizes. No collective saves."""

from ckpt.listing import newest_first, read_manifest
from ckpt.stores import open_store
from tests.ckpt.ranks import run_ranks


def jobs(path, text):
    """`save rows` for a directory of its own under `path`."""
    return text.replace("@", f"{path}/").split()


def test_a_state_loads_in_any_other_world_and_layout(tmp_path):
    run_ranks(*_first(1, jobs(tmp_path, "save @one rows")))
    run_ranks(
        *_first(
            4,
            jobs(
                tmp_path,
                "load @one hsdp other then save @rows rows then load @rows rows same "
                "then save @2d 2d then save @hsdp hsdp then load @hsdp hsdp same",
            ),
        )
    )
    run_ranks(
        *_first(
            2,
            jobs(
                tmp_path,
                "load @rows rows other then load @2d rows other then load @hsdp columns other "
                "then save @two rows then stages @stages then damaged_for_one @damaged",
            ),
        )
    )
    run_ranks(*_first(1, jobs(tmp_path, "load @2d rows other then load @two rows other")))
    assert_replicas_shared(tmp_path / "hsdp")


def assert_replicas_shared(path):
    """Each of four ranks wrote its part of what they hold in common, and nothing twice."""
    manifest = read_manifest(open_store(str(path)), 1)
    logical = sum(p.nbytes for t in manifest.tensors.values() for p in t.pieces)
    assert manifest.stored_bytes < 1.2 * logical
    assert len({file.key.split("-")[1] for file in manifest.files}) == 4


def test_a_dead_replica_is_replaced_and_the_step_is_committed(tmp_path):
    results = run_ranks("one_dies", 2, tmp_path, check=False)
    assert results[0][0] == 0, results[0][1]
    assert newest_first(open_store(str(tmp_path))) == [2, 1]


def test_a_step_whose_only_holder_died_is_refused_with_the_reason(tmp_path):
    results = run_ranks("sole_holder_dies", 2, tmp_path, check=False)
    assert "REFUSED IncompleteSave" in results[0][1], results[0][1]
    assert newest_first(open_store(str(tmp_path))) == [1]


def test_ranks_on_two_hosts_meet_through_the_store_and_keep_each_others_memory(tmp_path):
    run_ranks(*_first(2, jobs(tmp_path, "hosts @hosts then ring @ring then local_disks @local")))


def test_a_lost_host_is_replaced_by_a_replica(tmp_path):
    results = run_ranks("host_dies", 2, tmp_path, check=False)
    assert results[0][0] == 0, results[0][1]
    assert newest_first(open_store(str(tmp_path))) == [2, 1]


def _first(ranks, words):
    return words[0], ranks, *words[1:]
