"""`failure`: retry budgets, drop budgets, and what happens to a group that fails.

Key names and defaults are those of NeMo-RL's `async_rl.rollout_failure`; here an attempt is
one rollout's, not a group's.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from configs.base import Section


class FailureConfig(Section):
    """Budgets. `infra` failures are retried with back-off, `data` failures get a fresh sample at once."""

    max_infra_attempts_per_prompt: int = Field(
        default=5, ge=1, description="Infrastructure failures of one rollout until it is lost."
    )
    max_data_attempts_per_prompt: int = Field(
        default=2, ge=1, description="Data failures of one rollout until it is lost."
    )
    backoff_base_s: float = Field(
        default=1.0, gt=0, description="Wait after the first infrastructure failure; doubles."
    )
    max_backoff_s: float = Field(default=30.0, gt=0, description="Longest wait between infrastructure retries.")
    max_skipped_prompts: int = Field(
        default=0, ge=0, description="Groups that may be dropped for data failures in the life of the run."
    )
    max_consecutive_dropped_prompts: int = Field(
        default=0,
        ge=0,
        description="Groups that may be dropped for infrastructure failures with no group kept between.",
    )
    min_step_batch_fraction: float = Field(
        default=0.9, gt=0, le=1, description="A step needs ceil(num_prompts_per_step * this) groups, or the run fails."
    )
    on_lost_rollout: Literal["mask", "drop_group"] = Field(
        default="mask",
        description="A lost rollout keeps its place in its group without a gradient or a vote, or costs the group.",
    )
    on_dropped_prompt: Literal["shrink", "replace", "park"] = Field(
        default="shrink",
        description="A group that cannot train makes its step smaller, gives its place to a fresh prompt, or waits for "
        "an operator. With park, a step below its floor waits, too.",
    )
    max_replacement_attempts: int = Field(
        default=1, ge=1, description="Fresh prompts that may be tried for one slot (with replace)."
    )
    park_timeout_s: float = Field(
        default=86_400.0, gt=0, description="A parked group is dropped, and a parked step ends the run, after so long."
    )
    stall_timeout_s: float = Field(
        default=600.0, gt=0, description="A rollout without a model call or a result for so long is named as stuck."
    )
    ledger_timeout_s: float = Field(default=60.0, gt=0, description="Deadline of one try to write to the ledger.")
    ledger_deadline_s: float = Field(
        default=86_400.0, gt=0, description="The run ends when the ledger cannot be written for so long."
    )

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> "FailureConfig":
        if self.max_backoff_s < self.backoff_base_s:
            raise ValueError(
                f"max_backoff_s ({self.max_backoff_s}) must not be below backoff_base_s ({self.backoff_base_s})"
            )
        return self


def floor_of(prompts: int, fraction: float) -> int:
    """Fewest groups that make a step: the float product, rounded up (0.9 of 9 is 9, of 10 is 9)."""
    return math.ceil(prompts * fraction)
