"""Group-relative advantages: one number per rollout, computed once over the rewards of its group.

Rollouts that are not valid never vote: they enter neither baseline nor standard deviation, and their advantage is 0.
Formulas: NeMo-RL's GRPO estimator, with its valid mask; the reward of a rollout that did not stop by itself is that of
DAPO's soft punishment in NeMo-RL's simplest form (`stop_properly_penalty_coef`).
"""

import math
from collections.abc import Sequence


def group_advantages(
    rewards: Sequence[float],
    valid: Sequence[bool],
    *,
    leave_one_out: bool,
    normalize: bool,
    std_epsilon: float,
) -> list[float]:
    """Advantage of each rollout of one group; 0 for all when fewer than two are valid.

    The baseline is the mean reward, the standard deviation has Bessel's correction; with `leave_one_out` both are
    taken over the other valid rollouts. A standard deviation of 0 leaves the advantage as it is.
    """
    if len(rewards) != len(valid):
        raise ValueError(f"A group has {len(rewards)} rewards but {len(valid)} valid flags; they must be equally many.")
    voters = [float(reward) for reward, counts in zip(rewards, valid, strict=True) if counts]
    if any(not math.isfinite(reward) for reward in voters):
        raise ValueError("A valid rollout has a reward that is not a finite number.")
    if len(voters) < 2:
        return [0.0] * len(rewards)
    whole = _mean_and_std(voters)
    advantages: list[float] = []
    voter = 0
    for reward, counts in zip(rewards, valid, strict=True):
        if not counts:
            advantages.append(0.0)
            continue
        baseline, std = _mean_and_std(voters[:voter] + voters[voter + 1 :]) if leave_one_out else whole
        voter += 1
        advantage = float(reward) - baseline
        advantages.append(advantage / (std + std_epsilon) if normalize and std > 0 else advantage)
    return advantages


def shaped_reward(reward: float, truncated: bool, stop_properly_penalty_coef: float | None) -> float:
    """The reward as the advantage sees it: times the coefficient for a rollout that was cut off by a token limit."""
    return reward * stop_properly_penalty_coef if truncated and stop_properly_penalty_coef is not None else reward


def clipped_advantage(advantage: float, lowest: float | None, highest: float | None) -> float:
    """The advantage within its bounds; None is no bound. Bounds enclose 0, so an advantage of 0 stays 0."""
    if lowest is not None:
        advantage = max(advantage, lowest)
    return advantage if highest is None else min(advantage, highest)


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Exact mean, and standard deviation with Bessel's correction (0 for one value)."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
