"""From the settled rollouts of a step's groups to its batch: one advantage per rollout, copied to each of its rows.

Masked and lost rollouts have no vote, and one placeholder row each, which no loss can see: every rollout of a group
owns a row of the batch. The same groups always give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from activities.training.advantages import group_advantages
from activities.training.batch import TrainingBatch, TrainingRow, placeholder
from configs.grpo import GrpoConfig
from storage.records import SettledRollout


def assemble(
    run_id: str,
    step: int,
    rollouts: Sequence[SettledRollout],
    rows: Mapping[str, Sequence[TrainingRow]],
    grpo: GrpoConfig,
) -> TrainingBatch:
    """Build the batch of a step. `rows`: the rows of each valid rollout, by rollout id, advantages not yet set."""
    groups: dict[str, list[SettledRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    batch: list[TrainingRow] = []
    for group in groups.values():
        advantages = group_advantages(
            [rollout.reward or 0.0 for rollout in group],
            [rollout.state == "valid" for rollout in group],
            leave_one_out=grpo.use_leave_one_out_baseline,
            normalize=grpo.normalize_rewards,
            std_epsilon=grpo.advantage_std_epsilon,
        )
        for rollout, advantage in zip(group, advantages, strict=True):
            if rollout.state == "valid":
                batch += [replace(row, advantage=advantage) for row in rows[rollout.rollout_id]]
            else:
                batch.append(placeholder(rollout.rollout_id))
    return TrainingBatch(run_id, step, tuple(batch))


def mean_reward(rollouts: Sequence[SettledRollout]) -> float:
    """Mean reward over the valid rollouts; every group of a batch has at least one."""
    rewards = [rollout.reward for rollout in rollouts if rollout.state == "valid" and rollout.reward is not None]
    return sum(rewards) / len(rewards)
