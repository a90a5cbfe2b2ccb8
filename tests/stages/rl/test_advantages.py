import numpy as np
import pytest

from stages.rl.advantages import STD_FLOOR, group_advantages


def advantages_of(groups, scores, *, norm_by_std=True, filter_groups=True):
    return group_advantages(groups, scores, norm_by_std=norm_by_std, filter_groups=filter_groups)


def test_value_is_the_deviation_over_the_populations_std():
    found = advantages_of([0, 0, 0, 0], [1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(
        found.values_N, np.array([0.75, -0.25, -0.25, -0.25]) / (np.sqrt(0.1875) + STD_FLOOR), 1e-6
    )
    assert found.used_N.all() and found.num_groups_used == 1


def test_without_std():
    assert advantages_of([0, 0], [1.0, 0.0], norm_by_std=False).values_N.tolist() == [0.5, -0.5]


def test_r31_constant_groups_give_nothing_even_side_by_side():
    groups = [(1, i // 8) for i in range(32)]
    found = advantages_of(groups, [float(i // 8) for i in range(32)])
    assert not found.used_N.any() and not found.values_N.any() and found.num_groups_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_r31_groups_follow_their_key_whatever_the_order(seed):
    random = np.random.default_rng(seed)
    groups = [(step, prompt) for step in (1, 2) for prompt in range(3) for _ in range(4)]
    scores = random.random(len(groups)).tolist()
    order = random.permutation(len(groups))
    straight = advantages_of(groups, scores).values_N
    shuffled = advantages_of([groups[i] for i in order], [scores[i] for i in order]).values_N
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6)
    one_group = np.array(scores[4:8])
    np.testing.assert_allclose(straight[4:8], (one_group - one_group.mean()) / (one_group.std() + STD_FLOOR), rtol=1e-6)


def test_members_without_a_score_are_left_out_of_their_groups_mean():
    found = advantages_of([0, 0, 0], [1.0, None, 0.0], norm_by_std=False)
    assert found.values_N.tolist() == [0.5, 0.0, -0.5]
    assert found.used_N.tolist() == [True, False, True]


def test_r32_groups_with_fewer_than_two_scores_are_not_used():
    found = advantages_of([0, 0, 1, 1, 2, 2], [None, None, 1.0, None, 1.0, 0.0])
    assert found.used_N.tolist() == [False, False, False, False, True, True]
    assert np.isfinite(found.values_N).all() and found.num_groups_used == 1


def test_unfiltered_groups_of_equal_scores_count_with_advantage_zero():
    found = advantages_of([0, 0, 0], [0.1, 0.1, 0.1], filter_groups=False)
    assert found.used_N.all() and found.values_N.tolist() == [0.0, 0.0, 0.0]


def test_no_sequences():
    found = advantages_of([], [])
    assert len(found.values_N) == 0 and found.num_groups_used == 0
