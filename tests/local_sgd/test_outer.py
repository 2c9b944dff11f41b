import pytest
import torch

from ftcore.base.errors import BadSetting
from ftcore.local_sgd.fragments import Schedule
from ftcore.local_sgd.replica import OuterOptimizer
from tests.local_sgd.rig import Rig, batch, model

AVERAGE = OuterOptimizer(rate=1.0, momentum=0.0)


def all_equal(tensors):
    return all(torch.equal(tensors[0], t) for t in tensors[1:])


def flat(m):
    return torch.cat([p.detach().flatten() for p in m.parameters()])


def alone(m, numbers, index, *, lr=0.05):
    """The stupid twin's inner steps: plain SGD."""
    optimizer = torch.optim.SGD(m.parameters(), lr=lr)
    for number in numbers:
        optimizer.zero_grad()
        (m(batch(number, index)) - 1).pow(2).mean().backward()
        optimizer.step()
    return flat(m)


def test_local_sgd_is_the_mean_of_what_each_group_reached_alone():
    rig = Rig("ab", optimizer=AVERAGE)
    rig.step()
    reached = [alone(model(), range(4), index) for index in (0, 1)]
    torch.testing.assert_close(rig.members[0].params(), sum(reached) / 2)
    assert all_equal([m.params() for m in rig.members])


def test_diloco_is_nesterov_sgd_on_the_mean_change():
    rig = Rig("ab")
    start = flat(model())
    outer = start.clone()
    outer.requires_grad_()
    twin = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(3):
        numbers = range(4 * round_, 4 * round_ + 4)
        reached = []
        for index in (0, 1):
            m = model()
            torch.nn.utils.vector_to_parameters(outer.detach().clone(), m.parameters())
            reached.append(alone(m, numbers, index))
        outer.grad = outer.detach() - sum(reached) / 2
        twin.step()
        rig.step()
        torch.testing.assert_close(rig.members[0].params(), outer.detach(), atol=1e-5, rtol=1e-5)


VARIANTS = {
    "plain": {},
    "delay": {"schedule": Schedule(sync_every=4, delay=2)},
    "long delay": {"schedule": Schedule(sync_every=8, delay=5)},
    "fragments": {"schedule": Schedule(sync_every=4, fragments=2)},
    "streaming": {"schedule": Schedule(sync_every=8, fragments=2, delay=3), "keep": 0.5},
    "int8": {"quantize": "int8"},
    "fp8 streaming": {"schedule": Schedule(sync_every=8, fragments=4, delay=1), "quantize": "fp8"},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


@variants
def test_all_groups_have_the_same_outer_parameters_bit_for_bit(options):
    rig = Rig("abc", **options)
    for _ in range(5):
        rig.step()
        assert all_equal([m.outer_params() for m in rig.members])
        if not options.get("keep"):
            fragment = rig.members[0].outer.schedule.fragment_of(rig.index - 1)
            assert all_equal([m.outer.fragments[fragment].inner() for m in rig.members])
    assert rig.attempts == 5


@variants
def test_training_goes_down(options):
    rig = Rig("ab", **options)
    rig.step()
    first = rig.members[0].loss
    for _ in range(30):
        rig.step()
    assert rig.members[0].loss < first / 3


@variants
def test_a_death_in_mid_interval_costs_the_others_no_inner_step(options):
    rig = Rig("abc", **options)
    rig.step()
    rig.step(during=lambda m, shard: "die" if m.name == "b" else None)
    assert [m.name for m in rig.members] == ["a", "c"]
    assert rig.attempts == 3
    assert all_equal([m.outer_params() for m in rig.members])
    inner = rig.members[0].outer.schedule.inner_steps
    assert [number for number, _ in rig.members[0].ran] == list(range(2 * inner))
    rig.step()
    assert all_equal([m.outer_params() for m in rig.members])


@variants
def test_a_death_while_the_reduction_overlaps(options):
    """The victim dies after its last inner step: with a delay the reduction is under way then."""
    rig = Rig("abc", **options)
    last = rig.members[0].outer.schedule.inner_steps - 1
    rig.step(during=lambda m, s: "die" if m.name == "a" and s.step == last else None)
    assert [m.name for m in rig.members] == ["b", "c"]
    assert all_equal([m.outer_params() for m in rig.members])


@variants
def test_a_joiner_brings_nothing_and_is_equal_after_the_next_outer_step(options):
    rig = Rig("ab", **options)
    rig.step()
    rig.join("0")  # sorts first, so all replica ranks move
    rig.step()
    joiner = next(m for m in rig.members if m.name == "0")
    assert joiner.ran == []
    assert all_equal([m.outer_params() for m in rig.members])
    rig.step()
    assert len(joiner.ran) == joiner.outer.schedule.inner_steps
    assert all_equal([m.outer_params() for m in rig.members])


def test_a_restarted_group_comes_back_and_a_group_alone_goes_on():
    rig = Rig("ab")
    rig.step(during=lambda m, shard: "die" if m.name == "b" else None)
    rig.step()
    rig.join("b")
    rig.step()
    rig.step()
    assert all_equal([m.params() for m in rig.members])


def test_a_group_alone_takes_the_outer_step_by_itself():
    rig = Rig("a", optimizer=AVERAGE)
    rig.step()
    torch.testing.assert_close(rig.members[0].params(), alone(model(), range(4), 0))


def test_the_loss_is_the_mean_over_inner_steps_and_groups():
    rig = Rig("ab", schedule=Schedule(sync_every=1))
    expected = [(model()(batch(0, i)) - 1).pow(2).mean().item() for i in (0, 1)]
    rig.step()
    assert rig.members[0].loss == pytest.approx(sum(expected) / 2)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 0), (4, 0, 0), (4, 3, 0), (4, 1, 4), (4, 2, 2), (4, 1, -1)]
)
def test_schedules_that_cannot_be_are_refused(numbers):
    with pytest.raises(BadSetting):
        Schedule(sync_every=numbers[0], fragments=numbers[1], delay=numbers[2])


def test_more_fragments_than_parameters_are_refused():
    with pytest.raises(BadSetting, match="5 fragments were asked for, but the model has 4"):
        Rig("a", schedule=Schedule(sync_every=5, fragments=5))
