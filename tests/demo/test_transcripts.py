"""The transcripts are deterministic, keep their bookkeeping right, and leave one decision to be learned."""

import random
import re
from statistics import mean

import pytest

from workers.demo.transcripts import Turn, episode, views
from workers.gym.safe.game import Safe


def replayed_reward(seed: int, turns: list[Turn]) -> float:
    safe = Safe(seed)
    for turn in turns:
        if turn.arguments is not None:
            assert safe.turn(turn.arguments) == turn.output
    return safe.reward


def test_the_same_draw_gives_the_same_episode() -> None:
    assert episode(7, 0.5, random.Random(1)) == episode(7, 0.5, random.Random(1))
    assert episode(7, 0.0, random.Random(1)) != episode(7, 0.0, random.Random(2))


@pytest.mark.parametrize(("split_probability", "expected"), [(0.0, 0.33), (1.0, 0.92)])
def test_the_plan_decides_the_reward(split_probability: float, expected: float) -> None:
    rewards = [replayed_reward(s, episode(s, split_probability, random.Random(s))) for s in range(729)]
    assert mean(rewards) == pytest.approx(expected, abs=0.03)


def test_every_thought_repeats_the_plan_of_the_first() -> None:
    for seed in range(50):
        turns = episode(seed, 0.5, random.Random(seed))
        assert len({turn.thought.split()[0] for turn in turns if turn.arguments}) == 1


def test_the_range_in_a_thought_always_holds_the_hidden_digit() -> None:
    for seed in range(100):
        for turn in episode(seed, 0.5, random.Random(seed)):
            if turn.arguments is not None:
                dial, low, high = map(int, re.findall(r"\d+", turn.thought))
                assert low <= Safe(seed).code[dial - 1] <= high


def test_views_sample_every_turn_once() -> None:
    turns = episode(5, 0.0, random.Random(5))
    sampled = [p.text for view in views(5, turns, 4) for p in view if p.sampled]
    assert sampled == [p.text for p in views(5, turns, len(turns))[0] if p.sampled]
    assert len(sampled) == len(turns)


def test_a_later_view_keeps_only_the_last_thought_before_it() -> None:
    turns = episode(5, 0.0, random.Random(5))
    context = "".join(p.text for p in views(5, turns, 4)[1] if not p.sampled)
    assert context.count("<think>") == 1
    assert turns[3].thought in context
