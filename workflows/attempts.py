"""The retry budgets of one rollout, as a pure fold over its failures.

Infrastructure failures and data failures have separate budgets; neither resets nor consumes the other's. A rollout that
its worker handed over costs neither, for a bounded number of times.
"""

from configs.failure import FailureConfig
from workflows.failures import HANDED_OVER, POLICY_MISMATCH
from workflows.messages import Bucket, Failure, Message

MAX_HANDOVERS = 100
_MAX_DOUBLINGS = 60  # keeps the power finite, however large the budget


class AttemptBudget(Message):
    """Failures so far, and the times that the rollout was handed over."""

    infra_failures: int = 0
    data_failures: int = 0
    handovers: int = 0

    def after(self, bucket: Bucket, count: int = 1) -> "AttemptBudget":
        """Counters after `count` more failures of one bucket."""
        field = f"{bucket}_failures"
        return self.model_copy(update={field: getattr(self, field) + count})

    def charged(self, failure: Failure, config: FailureConfig) -> "AttemptBudget":
        """Counters after an activity ended with this failure, and with the infrastructure failures before it.

        Temporal retries an infrastructure failure until the whole budget is spent, except those that the workflow
        answers itself: they cost one.
        """
        if self.is_handover(failure):
            return self.after("infra", failure.retries).model_copy(update={"handovers": self.handovers + 1})
        if failure.bucket == "data":
            return self.after("infra", failure.retries).after("data")
        if failure.failure_class in (HANDED_OVER, POLICY_MISMATCH):
            return self.after("infra", failure.retries + 1)
        return self.after("infra", self.infra_attempts_left(config))

    def is_handover(self, failure: Failure) -> bool:
        """Whether the rollout goes on elsewhere at nobody's cost."""
        return failure.failure_class == HANDED_OVER and not failure.final and self.handovers < MAX_HANDOVERS

    def infra_attempts_left(self, failure: FailureConfig) -> int:
        """Infrastructure failures that may still happen."""
        return max(0, failure.max_infra_attempts_per_prompt - self.infra_failures)

    def next_backoff_s(self, failure: FailureConfig) -> float:
        """Wait after the next infrastructure failure; a data failure in between does not start it over."""
        doublings = min(self.infra_failures, _MAX_DOUBLINGS)
        return min(failure.backoff_base_s * 2.0**doublings, failure.max_backoff_s)

    def is_exhausted(self, failure: FailureConfig) -> bool:
        """Whether the rollout is lost."""
        return self.infra_attempts_left(failure) == 0 or self.data_failures >= failure.max_data_attempts_per_prompt
