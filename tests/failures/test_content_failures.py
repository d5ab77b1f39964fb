"""The content ends a rollout: its replay would end the same way, so it costs one masked rollout, or a fresh sample.

These are the lines "context length" and "context guard" of NeMo-RL's failure table, in which they cost a group.
"""

from typing import Any

import pytest

from tests.failures.policy_server import CALLS, TOO_LONG, refusing
from tests.failures.world import World
from tests.gym.stub_model import Reply

pytestmark = pytest.mark.integration

WHOLE = "g" * CALLS
LONG = Reply("deep thought " * 20, "use", {"number": 0})


async def test_a_prompt_too_long_for_vllm_masks_one_rollout_although_simple_agent_answers_200(world: World) -> None:
    world.episode.breaks(3, refusing(400, TOO_LONG), times=None)
    ended = await world.run_group("simple")
    (masked,), (sibling,) = ended.broken, ended.sound
    assert (masked.statuses, masked.ends, masked.calls) == (("200",), ["settled"], ("gggf",))
    assert masked.events[0][-1].failure_class == "ContextOverflow"
    assert (masked.record.state, masked.record.reason) == ("masked", "context_overflow")
    assert (sibling.statuses, sibling.calls) == (("200",), (WHOLE,))
    assert ended.counts == ("sealed", 1, 1, 0)


async def test_a_prompt_too_long_for_vllm_masks_one_rollout_although_the_compaction_agent_answers_500(
    world: World,
) -> None:
    world.episode.breaks(3, refusing(400, TOO_LONG), times=None)
    ended = await world.run_group("compacting")
    (masked,), (sibling,) = ended.broken, ended.sound
    assert (masked.statuses, masked.ends) == (("500",), ["settled"])
    assert masked.calls[0].replace("m", "") == "gggf"
    assert masked.events[0][-1].failure_class == "ContextOverflow"
    assert (masked.record.state, masked.record.reason) == ("masked", "context_overflow")
    assert sibling.calls[0].replace("m", "") == WHOLE
    assert ended.counts == ("sealed", 1, 1, 0)


async def test_a_context_guard_that_refuses_masks_one_rollout(world: World) -> None:
    world.episode.breaks(3, lambda: LONG, times=1)
    ended = await world.run_group("guarded")
    (masked,), (sibling,) = ended.broken, ended.sound
    assert (masked.statuses, masked.ends) == (("500",), ["settled"])
    assert masked.calls == ("mgmgmgmgmm",)  # measured, compacted, measured again, never sent
    assert (masked.record.state, masked.record.reason) == ("masked", "guard_refused")
    assert (sibling.statuses, sibling.calls[0].replace("m", "")) == (("200",), WHOLE)
    assert ended.counts == ("sealed", 1, 1, 0)


async def test_early_compaction_that_rescues_a_call_stays_a_success(world: World) -> None:
    world.episode.breaks(0, lambda: LONG, times=1)
    ended = await world.run_group("rescued")
    assert ended.counts == ("sealed", 2, 0, 0)
    assert [one.calls[0].replace("m", "") for one in ended.rollouts] == [WHOLE, WHOLE]
    assert sorted(one.settled.segments for one in ended.rollouts) == [1, 2]


async def test_a_reply_without_tokens_masks_one_rollout(world: World) -> None:
    world.episode.breaks(0, lambda: world.vllm.distorts(_without_tokens), times=1)
    ended = await world.run_group("simple")
    (masked,) = ended.broken
    assert (masked.statuses, masked.calls) == (("500",), ("f",))
    assert masked.events[0][0].failure_class == "NoGeneration"
    assert (masked.record.state, masked.record.reason) == ("masked", "no_generation")
    assert ended.counts == ("sealed", 1, 1, 0)


async def test_a_group_in_which_no_rollout_is_valid_is_dropped(world: World) -> None:
    world.vllm.policy = lambda messages: refusing(400, TOO_LONG)() or LONG
    ended = await world.run_group("simple")
    assert ended.counts == ("dropped", 0, 2, 0)
    assert (ended.result.bucket, ended.group.state) == ("data", "dropped")
    assert "context_overflow" in (ended.result.reason or "")
    assert [one.ends for one in ended.rollouts] == [["settled"], ["settled"]]


async def test_resample_answers_a_content_failure_with_a_fresh_sample(world: World) -> None:
    world.episode.breaks(3, refusing(400, TOO_LONG), times=1)
    ended = await world.run_group("simple", rollouts={"on_content_failure": "resample"})
    (resampled,), (sibling,) = ended.broken, ended.sound
    assert (resampled.calls, resampled.record.state) == (("gggf", WHOLE), "valid")
    assert resampled.ends == ["ContentFailure data", "settled"]
    assert [one.sample for one in resampled.attempts] == [0, 1]
    assert "ContentFailure" in (resampled.attempts[1].fresh_reason or "")
    assert not set(resampled.sampled(0)) & set(resampled.sampled(1))
    assert sibling.calls == (WHOLE,)
    assert ended.counts == ("sealed", 2, 0, 0)


async def test_resample_ends_with_the_data_budget(world: World) -> None:
    world.vllm.policy = lambda messages: refusing(400, TOO_LONG)() or LONG
    ended = await world.run_group(
        "simple", rollouts={"on_content_failure": "resample"}, failure={"max_data_attempts_per_prompt": 3}
    )
    assert ended.counts == ("dropped", 0, 0, 2)
    assert ended.result.bucket == "data"
    assert [one.ends for one in ended.rollouts] == [["ContentFailure data"] * 3] * 2


async def test_a_reply_that_is_cut_off_trains_unless_overlong_filtering_masks_the_rollout_whole(world: World) -> None:
    limit = {"max_output_tokens": 300}
    world.episode.say = lambda number: Reply("deep thought " * 40, answer="never said") if number == 2 else None
    trained = await world.run_group("simple", size=1, rollouts=limit)
    masked = await world.run_group("simple", size=1, rollouts=limit, grpo={"overlong_filtering": True})
    for ended, state in ((trained, "valid"), (masked, "masked")):
        (one,) = ended.rollouts
        assert (one.calls, one.statuses, one.record.state, one.record.truncated) == (("ggg",), ("200",), state, True)
        assert one.events[0][-1].finish_reason == "length"
    (one,) = masked.rollouts
    assert (one.record.reason or "").startswith("overlong")
    assert one.record.evidence_digest is None
    assert (trained.counts, masked.counts) == (("sealed", 1, 0, 0), ("dropped", 0, 1, 0))


def _without_tokens(answer: dict[str, Any]) -> None:
    answer["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}, "weight_versions": []}
