import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.queue.schema import GIVEN
from stages.rl.batch import Sample, pack, plan_micro_batches, plan_passes, plan_shares, split_groups, to_sample
from tests.fakes.tiny_policy import make_row

CPU = torch.device("cpu")
PAD = 0  # what pack() fills with


def sample(num_prompt, tokens, group=(1, 0), advantage=1.0):
    return Sample([5] * num_prompt, tokens, [-0.5] * len(tokens), [3] * len(tokens), advantage, group)


def test_r33_masks_come_from_lengths_where_pad_is_eos():
    """EOS has the padding's id: each row's final EOS is a target exactly once, the padding after it never."""
    rows = [sample(2, [7, PAD]), sample(3, [8, PAD, 9, PAD]), sample(1, [PAD])]
    micro = pack(rows, CPU)
    assert micro.ids_BL.shape == (3, 7)
    assert micro.predicts_BL.sum(1).tolist() == [2, 4, 1]
    assert micro.targets_T.tolist() == [7, PAD, 8, PAD, 9, PAD, PAD]
    # The mask and the flat targets agree: each masked column's next id is its target.
    shifted = torch.roll(micro.ids_BL, -1, dims=1)
    assert shifted[micro.predicts_BL].tolist() == micro.targets_T.tolist()


def test_pack_carries_each_tokens_own_values():
    rows = [Sample([1], [2, 3], [-0.1, -0.2], [4, 5], 0.5, (1, 0)), Sample([1, 1], [6], [-0.3], [6], -1.5, (1, 1))]
    micro = pack(rows, CPU)
    torch.testing.assert_close(micro.behaviour_T, torch.tensor([-0.1, -0.2, -0.3]))
    assert micro.advantages_T.tolist() == [0.5, 0.5, -1.5]
    assert micro.oldest_T.tolist() == [4, 5, 6]
    assert micro.first == 0 and micro.num_tokens == 3
    assert not micro.predicts_BL[:, : micro.first].any()


def test_tokens_that_were_given_are_read_and_predicted_by_nobody():
    rows = [Sample([1, 2], [3, 4, 5, 6], [-0.1, GIVEN, GIVEN, -0.4], [7, 8, 9, 10], 0.5, (1, 0)), sample(1, [5])]
    micro = pack(rows, CPU)
    assert micro.ids_BL[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert micro.predicts_BL[0].tolist() == [False, True, False, False, True, False]
    assert (micro.targets_T.tolist(), micro.oldest_T.tolist()) == ([3, 6, 5], [7, 10, 3])
    torch.testing.assert_close(micro.behaviour_T, torch.tensor([-0.1, -0.4, -0.5]))


def test_a_token_is_as_old_as_the_oldest_thing_it_was_made_from():
    row = make_row(1, 0, 0, prompt_ids=[1], tokens=[5, 6, 7], logprobs=[-1.0] * 3, score=1.0)
    row.versions[:], row.kv_versions[:] = [3, 4, 4], [3, 3, 4]
    assert to_sample(row, 0.0).oldest == [3, 3, 4]


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 2000))
def test_micro_batches_hold_each_row_once_within_the_limit(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        longest = max(lengths[i] for i in part)
        assert len(part) == 1 or len(part) * longest <= max_tokens
        assert len(part) * longest <= 2 * sum(lengths[i] for i in part)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 9))
def test_shares_hold_each_row_once_and_are_even(lengths, num_ranks):
    shares = plan_shares(lengths, num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert plan_shares(lengths, 1) == [list(range(len(lengths)))]


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 2000), st.integers(1, 9))
def test_r34_each_rank_has_as_many_passes_and_each_row_counts_once(lengths, max_tokens, num_ranks):
    plans = plan_passes(lengths, max_tokens, num_ranks)
    assert len(plans) == num_ranks and len({len(plan) for plan in plans}) == 1
    counting = [rows for plan in plans for rows, is_idle in plan if not is_idle]
    assert sorted(i for rows in counting for i in rows) == list(range(len(lengths)))
    for plan in plans:
        idle = [is_idle for _, is_idle in plan]
        assert idle == sorted(idle)  # the last ones: so an update's last pass is the same one on all ranks
        assert all(lengths[i] == min(lengths) for rows, is_idle in plan if is_idle for i in rows)
    assert not all(plan[-1].is_idle for plan in plans if plan) or not lengths  # none is without need
    (alone,) = plan_passes(lengths, max_tokens, 1)
    assert [rows for rows, _ in alone] == plan_micro_batches(lengths, max_tokens)


@given(st.permutations([(prompt, member) for prompt in range(5) for member in range(3)]), st.integers(1, 9))
def test_r31_parts_are_whole_groups_in_any_order(order, num_parts):
    parts = split_groups([sample(1, [member], (1, prompt)) for prompt, member in order], num_parts, (7, 1))
    assert all(parts) and len(parts) == min(num_parts, 5)
    sizes = [len(part) for part in parts]
    assert sum(sizes) == 15 and max(sizes) - min(sizes) <= 3
    assert all(size % 3 == 0 for size in sizes)
    groups = [sorted({s.group for s in part}) for part in parts]
    assert sum(map(len, groups)) == 5  # none is cut
    straight = split_groups([sample(1, [m], (1, p)) for p in range(5) for m in range(3)], num_parts, (7, 1))
    assert groups == [sorted({s.group for s in part}) for part in straight]


def test_each_step_has_its_own_permutation():
    samples = [sample(1, [1], (1, prompt)) for prompt in range(16)]
    orders = {tuple(s.group[1] for s in split_groups(samples, 1, (7, step))[0]) for step in range(5)}
    assert len(orders) == 5
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert np.array_equal(split_groups(samples, 1, (7, 1)), split_groups(samples, 1, (7, 1)))
