"""The four policies: what a failure costs, what is tried again, and how often.

All four run over the same servers and through the same activity. They differ in the unit that is tried again, in the
budget of that unit, and in what a later attempt takes over.
"""

from dataclasses import dataclass
from typing import Literal

from configs.failure import FailureConfig
from configs.rollouts import RecoveryMode


@dataclass(frozen=True)
class Policy:
    """A failed `unit` is tried again until `budget` is used up. `recovery`: of a rollout that is tried again."""

    name: str
    title: str
    unit: Literal["group", "rollout"]
    recovery: RecoveryMode
    budget: FailureConfig


DROP_GROUP = Policy(
    "drop-group",
    "drop the group",
    "group",
    "fresh",
    FailureConfig(max_infra_attempts_per_prompt=1, max_data_attempts_per_prompt=1),
)
RETRY_GROUP = Policy("retry-group", "retry the group", "group", "fresh", FailureConfig())
RETRY_ROLLOUT = Policy("retry-rollout", "retry the rollout from the start", "rollout", "fresh", FailureConfig())
ONBELAY = Policy("onbelay", "Onbelay", "rollout", "replay", FailureConfig())
POLICIES = (DROP_GROUP, RETRY_GROUP, RETRY_ROLLOUT, ONBELAY)
