"""FSDP2 states with uneven and empty shards, saved and loaded at different world sizes."""

from tests.interop import ranks


def test_sharded_states_go_both_ways_between_us_and_dcp_at_other_world_sizes(tmp_path):
    ranks.run(2, ranks.save_all, str(tmp_path))
    ranks.run(3, ranks.load_all, str(tmp_path))
