"""What an answer says of its own worth: it counts, it is masked, or there is no result and the attempt has failed.

NeMo-Gym's `mask_sample` says that the reward is no measurement, `failure_kind` what went wrong, and neither implies the
other. The first line that fits decides:

| the answer has                                                 | then                                               |
|----------------------------------------------------------------|----------------------------------------------------|
| `_ng_failure_class` (servers before `failure_kind`)            | failed: data if `_ng_failure_terminal`, else infra |
| an infra kind, and a mask, no verification, no reward, or 0    | failed, infra: it is replayed and measured again   |
| `mask_sample`                                                  | masked: the kind, and what `failure_reason` says   |
| `verification_skipped`                                         | masked: the reward is a setting of the agent       |
| another kind or a reason, and no reward                        | failed, data                                       |
| no reward                                                      | IntegrityError                                     |
| a kind or a reason, and a reward                               | it counts; what is said is logged                  |

A reward of 0 beside a failure of the infrastructure is what servers write down that measured nothing, so it is no
evidence; any other reward was earned in spite of it. Where the kind blames the policy, 0 is a measurement.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from activities.errors import EnvironmentFailed, EnvironmentRefused, IntegrityError, one_line
from activities.rollouts.failure_kinds import bucket_of_kind, failure_kind

UNNAMED_MASK = "environment_masked"


@dataclass(frozen=True)
class Verdict:
    """`reward` is None only where `masked`, the reason to mask, is not. `remark`: a failure in spite of which the
    answer counts."""

    reward: float | None
    masked: str | None = None
    remark: str | None = None


def verdict(answer: dict[str, Any]) -> Verdict:
    """Read an agent's answer, or the `result` of an episode.

    Raises:
        EnvironmentFailed, EnvironmentRefused: the answer tells of a failure, and has no result that counts.
        IntegrityError: a missing or non-finite reward, and no word on why.
    """
    if answer.get("_ng_failure_class"):
        failed = EnvironmentRefused if answer.get("_ng_failure_terminal") else EnvironmentFailed
        raise failed(*_failure(answer["_ng_failure_class"], answer.get("failure_reason") or answer.get("error")))
    name, reason = answer.get("failure_kind"), answer.get("failure_reason")
    told = _told(name, reason)
    value = answer.get("reward")
    reward = float(value) if is_finite(value) else None
    masks, skipped = _masks(answer), bool(answer.get("verification_skipped"))
    if bucket_of_kind(failure_kind(name)) == "infra" and (masks or skipped or not reward):
        raise EnvironmentFailed(*_failure(name, reason))
    if masks:
        return Verdict(reward, masked=told or UNNAMED_MASK)
    if skipped:
        return Verdict(reward, masked="verification_skipped: the agent was told not to ask for a reward")
    if reward is None and told is not None:
        raise EnvironmentRefused(*_failure(name, reason))
    if reward is None:
        raise IntegrityError(f"the answer's reward is {value!r}, expected a finite number")
    return Verdict(reward, remark=told)


def failure_of_episode(failure: dict[str, Any]) -> EnvironmentFailed | EnvironmentRefused:
    """The error for the `failure` of an environment server. It says itself whether another attempt can help."""
    failed = EnvironmentRefused if failure.get("terminal") else EnvironmentFailed
    text, kind = _failure(failure.get("failure_kind"), failure.get("failure_reason"))
    stage = _told(failure.get("stage"))
    return failed(text if stage is None else f"stage {stage}: {text}", kind)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether this is a number, and one that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _masks(answer: dict[str, Any]) -> bool:
    config = answer.get("instance_config")
    return bool(answer.get("mask_sample") or (isinstance(config, dict) and config.get("mask_sample")))


def _failure(name: Any, reason: Any) -> tuple[str, str | None]:
    """What an error is told: a text, and the kind, which is not said twice."""
    kind = failure_kind(name)
    return _told(None if kind else name, reason) or "no reason is given", kind


def _told(*texts: Any) -> str | None:
    """One line of what is said, or None when nothing is. Foreign text of any kind and length."""
    return one_line(": ".join(str(text) for text in texts if text)) or None
