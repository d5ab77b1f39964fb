"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups carry no signal, and how many a step may sample. Pure.

Where the valid rollouts of a group all have the same reward, no advantage is anything but 0. Such a group is set aside,
and the next prompt of the run takes its place. What counts is the standard deviation of the whole group: one that
leaves a rollout out is 0 for the lone winner of [1, 0, 0, 0], which has the most to teach.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal

from configs.grpo import GrpoConfig
from workflows.budgets import RunEnds
from workflows.messages import Purpose

_MAX_NAMED_REWARDS = 8


class SamplingExhausted(RunEnds):
    """A step has sampled as many groups as it may, and too few of them carry a signal."""


def carries_signal(rewards: Collection[float]) -> bool:
    """Whether the rewards of a group's valid rollouts differ. They are the environment's, and compared exactly: the
    standard deviation of equal numbers is 0, that of any others is not."""
    return bool(rewards) and min(rewards) != max(rewards)


def good_ending(rewards: Collection[float], purpose: Purpose, grpo: GrpoConfig) -> Literal["sealed", "set_aside"]:
    """How a group ends that is good enough to train. An evaluation or a diagnostic copy is never set aside."""
    if grpo.use_dynamic_sampling and purpose == "train" and not carries_signal(rewards):
        return "set_aside"
    return "sealed"


def reason_of(prompt_id: str, rewards: Collection[float]) -> str:
    """Why a group was set aside."""
    have = "its one valid rollout has" if len(rewards) == 1 else f"all {len(rewards)} valid rollouts have"
    return (
        f"prompt {prompt_id}: {have} reward {min(rewards):g}, so none has an advantage; another prompt takes its place"
    )


def check_sampled(run_id: str, step: int, prompts: int, set_aside: Collection[float], grpo: GrpoConfig) -> None:
    """Raise SamplingExhausted when a step may not sample one more group in the place of one that was set aside.

    A step samples a group for each of its `prompts` places, and one for each that was set aside; `set_aside` are the
    rewards of those. Groups that were dropped have budgets of their own and do not count.
    """
    batches = grpo.dynamic_sampling_max_gen_batches
    if not grpo.use_dynamic_sampling or prompts + len(set_aside) <= prompts * batches:
        return
    raise SamplingExhausted(
        f"training step {step} sampled {prompts * batches} prompt group(s) for its {prompts} places, all that "
        f"grpo.dynamic_sampling_max_gen_batches={batches} allows, and needs one more: {len(set_aside)} were set aside "
        f"because the rewards of a group were equal ({tally(set_aside)})",
        f"`onbelay run resume {run_id} grpo.dynamic_sampling_max_gen_batches={2 * batches} --reason TEXT`; or resume "
        "it with grpo.use_dynamic_sampling=false, and such groups train with advantage 0. Prompts that the policy "
        "always or never solves teach nothing: a new run is better off without them, or with more rollouts for each "
        "(grpo.num_generations_per_prompt)",
    )


def told(prompts: int, set_aside: Collection[float], grpo: GrpoConfig) -> str | None:
    """What a step set aside, in a sentence; None where that is nothing."""
    if not set_aside:
        return None
    count, sampled = len(set_aside), prompts + len(set_aside)
    most = f" of at most {prompts * grpo.dynamic_sampling_max_gen_batches}" if grpo.use_dynamic_sampling else ""
    return f"set aside for equal rewards: {count} ({tally(set_aside)}); {sampled}{most} groups sampled"


def tally(rewards: Iterable[float]) -> str:
    """How many groups had which reward, the most frequent first: `37 all 1, 3 all 0`."""
    counted = Counter(f"{reward:g}" for reward in rewards).most_common()
    named = [f"{count} all {reward}" for reward, count in counted[:_MAX_NAMED_REWARDS]]
    others = sum(count for _, count in counted[_MAX_NAMED_REWARDS:])
    return ", ".join([*named, *([f"{others} with other rewards"] if others else [])])
