"""Which groups carry no signal, how many a step may sample, and what is said about it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.advantages import group_advantages
from configs.grpo import GrpoConfig
from workflows.dynamic_sampling import (
    SamplingExhausted,
    carries_signal,
    check_sampled,
    good_ending,
    reason_of,
    tally,
    told,
)

ON = GrpoConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=3)
REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([1.0, 0.0, 0.0, 0.0], True),  # whose lone winner has a leave-one-out deviation of 0
        ([1.0, 1.0, 1.0], False),
        ([0.0, -0.0], False),
        ([0.1 + 0.2, 0.3], True),  # nearly equal is not equal
        ([0.5], False),
        ([], False),
    ],
)
def test_a_group_carries_a_signal_once_two_valid_rewards_differ(rewards: list[float], signal: bool) -> None:
    assert carries_signal(rewards) is signal


@given(rewards=REWARDS, leave_one_out=st.booleans())
def test_what_carries_no_signal_is_what_has_no_advantage(rewards: list[float], leave_one_out: bool) -> None:
    advantages = group_advantages(
        rewards, [True] * len(rewards), leave_one_out=leave_one_out, normalize=False, std_epsilon=1e-6
    )
    assert carries_signal(rewards) == any(advantages)


@given(rewards=REWARDS, one_more=st.floats(-1e6, 1e6))
def test_the_order_does_not_count_and_one_more_reward_takes_no_signal_away(
    rewards: list[float], one_more: float
) -> None:
    assert carries_signal(rewards) == carries_signal(sorted(rewards)) <= carries_signal([*rewards, one_more])


@given(rewards=REWARDS)
def test_only_a_group_that_would_train_is_set_aside_and_only_where_the_run_samples_dynamically(
    rewards: list[float],
) -> None:
    assert good_ending(rewards, "train", ON) == ("sealed" if carries_signal(rewards) else "set_aside")
    assert good_ending(rewards, "train", GrpoConfig()) == "sealed"
    assert good_ending(rewards, "validation", ON) == good_ending(rewards, "diagnostic", ON) == "sealed"


@given(prompts=st.integers(1, 6), batches=st.integers(1, 5), set_aside=st.integers(0, 40))
def test_a_step_samples_at_most_so_many_times_its_prompts(prompts: int, batches: int, set_aside: int) -> None:
    grpo = GrpoConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=batches)
    off = grpo.model_copy(update={"use_dynamic_sampling": False})
    check_sampled("r", 0, prompts, [1.0] * set_aside, off)
    groups_with_one_more = prompts + set_aside
    if groups_with_one_more <= prompts * batches:
        check_sampled("r", 0, prompts, [1.0] * set_aside, grpo)
        return
    with pytest.raises(SamplingExhausted):
        check_sampled("r", 0, prompts, [1.0] * set_aside, grpo)


def test_the_error_says_what_was_set_aside_and_how_to_go_on() -> None:
    with pytest.raises(SamplingExhausted) as caught:
        check_sampled("r", 7, 20, [1.0] * 38 + [0.0] * 3, ON)
    text = str(caught.value)
    assert "training step 7 sampled 60 prompt group(s) for its 20 places" in text
    assert "grpo.dynamic_sampling_max_gen_batches=3" in text
    assert "41 were set aside because the rewards of a group were equal (38 all 1, 3 all 0)" in text
    assert "`onbelay run resume r grpo.dynamic_sampling_max_gen_batches=6 --reason TEXT`" in caught.value.remedy
    assert "grpo.use_dynamic_sampling=false" in caught.value.remedy


def test_the_reason_of_a_group_names_its_prompt_and_reward() -> None:
    assert "prompt p-1: all 4 valid rollouts have reward 0.25" in reason_of("p-1", [0.25] * 4)
    assert "prompt p-1: its one valid rollout has reward 1" in reason_of("p-1", [1.0])


def test_rewards_are_tallied_the_most_frequent_first_and_few_are_named() -> None:
    assert tally([]) == ""
    assert tally([0.0, 1.0, 1.0, -0.5]) == "2 all 1, 1 all 0, 1 all -0.5"
    assert tally(range(12)).endswith("1 all 7, 4 with other rewards")


def test_a_step_is_told_in_a_sentence_or_not_at_all() -> None:
    assert told(2, [], ON) is None
    assert told(2, [1.0, 1.0, 0.0], ON) == (
        "set aside for equal rewards: 3 (2 all 1, 1 all 0); 5 of at most 6 groups sampled"
    )
    assert told(2, [1.0], GrpoConfig()) == "set aside for equal rewards: 1 (1 all 1); 3 groups sampled"
