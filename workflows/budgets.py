"""What a run may lose: its drop counters against their limits, and the floor of a step. Pure.

The ledger counts, in the order in which groups end; workflows compare when a group was dropped. Infrastructure drops
count until a group ends well, data drops for the life of the run; a group that an operator dropped counts nowhere. A
group that was set aside has ended well: every rollout of it came through the infrastructure, so an outage is over. It
costs nothing; what it may cost together with others is bounded by `workflows.dynamic_sampling`.
"""

import math

from configs.failure import FailureConfig, floor_of
from workflows.messages import GroupResult


class RunEnds(Exception):
    """A loss that nothing covers; the run ends. `remedy` is what to change, for a person."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class BudgetExhausted(RunEnds):
    """A drop that no budget covers."""


class BelowFloor(RunEnds):
    """Too few groups are left for a step."""


def check_budgets(run_id: str, group: GroupResult, failure: FailureConfig) -> None:
    """Raise BudgetExhausted when a dropped group is one too many; `group.budgets` counts it already."""
    drops, skipped = group.budgets.consecutive_drops, group.budgets.skipped_prompts
    if group.bucket == "infra" and drops > failure.max_consecutive_dropped_prompts:
        raise BudgetExhausted(
            f"{drops} prompt groups in a row were dropped for infrastructure failures, exceeding "
            f"failure.max_consecutive_dropped_prompts={failure.max_consecutive_dropped_prompts}",
            _resume(run_id, f"failure.max_consecutive_dropped_prompts={drops}", "set-budget"),
        )
    if group.bucket == "data" and skipped > failure.max_skipped_prompts:
        raise BudgetExhausted(
            f"skipped {skipped - 1} prompts and this one also exhausted its data budget, exceeding "
            f"failure.max_skipped_prompts={failure.max_skipped_prompts}",
            _resume(run_id, f"failure.max_skipped_prompts={skipped}", "set-budget"),
        )


def check_floor(run_id: str, step: int, prompts: int, lost: int, failure: FailureConfig) -> None:
    """Raise BelowFloor when `lost` of `prompts` groups leave fewer than the floor."""
    left, floor = prompts - lost, floor_of(prompts, failure.min_step_batch_fraction)
    if left >= floor:
        return
    others = "failure.on_dropped_prompt=replace or park"
    fits = math.floor(100 * left / prompts) / 100
    raise BelowFloor(
        f"training step {step} lost {lost} of {prompts} prompt group(s), leaving {left}, below the floor of "
        f"{floor} set by failure.min_step_batch_fraction={failure.min_step_batch_fraction}",
        f"{_resume(run_id, f'failure.min_step_batch_fraction={fits}', 'set-floor')}; or resume it with {others}"
        if fits
        else f"repair what failed, then `onbelay run resume {run_id} --reason TEXT`, or resume it with {others}",
    )


def _resume(run_id: str, override: str, verb: str) -> str:
    return f"`onbelay run resume {run_id} {override} --reason TEXT` (`onbelay run {verb}` while a run goes on)"
