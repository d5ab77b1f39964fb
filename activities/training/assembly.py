"""From the settled rollouts of a step's groups to its batch: one advantage per rollout, copied to each of its rows.

Masked and lost rollouts have no vote, and one placeholder row each, which no loss can see: every rollout of a group
owns a row of the batch, and a rollout trains whole or not at all. The same groups always give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from activities.training.advantages import clipped_advantage, group_advantages, shaped_reward
from activities.training.batch import BadBatch, TrainingBatch, TrainingRow, placeholder
from activities.training.errors import EmptyBatch
from configs.grpo import GrpoConfig
from storage.records import SettledRollout


def assemble(
    run_id: str,
    step: int,
    rollouts: Sequence[SettledRollout],
    rows: Mapping[str, Sequence[TrainingRow]],
    grpo: GrpoConfig,
) -> TrainingBatch:
    """Build the batch of a step. `rows`: the rows of each valid rollout, by rollout id, advantages not yet set.

    Groups come in the order of their first rollout, the rollouts of a group in the order given, then segments.

    Raises:
        BadBatch: a valid rollout has no rows, or rows that are not its own, or not all of its segments.
        EmptyBatch: no row has a token that the loss can see.
    """
    groups: dict[str, list[SettledRollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    made: list[TrainingRow] = []
    for group in groups.values():
        for rollout, advantage in zip(group, _advantages(group, grpo), strict=True):
            if rollout.state == "valid":
                own = _own_rows(run_id, step, rollout, rows)
                made += [replace(row, advantage=advantage) for row in own]
            else:
                made.append(placeholder(rollout.rollout_id))
    batch = TrainingBatch(run_id, step, tuple(made))
    if batch.trained_tokens == 0:
        raise EmptyBatch(
            f"Step {step} of run {run_id}: its {len(groups)} groups have {len(rollouts)} rollouts and not one sampled "
            "token to train on, so there is no loss. `onbelay group show` says what was sampled and why rollouts are "
            "masked. A higher rollouts.min_valid_rollouts_per_group drops or parks such a group before its step trains."
        )
    return batch


def _advantages(group: Sequence[SettledRollout], grpo: GrpoConfig) -> list[float]:
    coefficient = grpo.reward_shaping.stop_properly_penalty_coef
    advantages = group_advantages(
        [shaped_reward(rollout.reward or 0.0, rollout.truncated, coefficient) for rollout in group],
        [rollout.state == "valid" for rollout in group],
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        std_epsilon=grpo.advantage_std_epsilon,
    )
    return [clipped_advantage(one, grpo.advantage_clip_low, grpo.advantage_clip_high) for one in advantages]


def _own_rows(
    run_id: str, step: int, rollout: SettledRollout, rows: Mapping[str, Sequence[TrainingRow]]
) -> Sequence[TrainingRow]:
    own = rows.get(rollout.rollout_id, ())
    where = f"Step {step} of run {run_id}: valid rollout {rollout.rollout_id}"
    if len(own) != rollout.segments or not own:
        raise BadBatch(
            f"{where} settled with {rollout.segments} segments, but its evidence holds {len(own)} rows. A rollout "
            "trains whole or not at all; its evidence in the blob store is not what was settled."
        )
    for row in own:
        if row.rollout_id != rollout.rollout_id or row.is_placeholder:
            what = "no sampled token" if row.is_placeholder else f"another owner, {row.rollout_id}"
            raise BadBatch(f"{where}: segment {row.segment} of its evidence has {what}.")
    return own


def mean_reward(rollouts: Sequence[SettledRollout]) -> float:
    """Mean reward over the valid rollouts; every group of a batch has at least one."""
    rewards = [rollout.reward for rollout in rollouts if rollout.state == "valid" and rollout.reward is not None]
    return sum(rewards) / len(rewards)
