"""What one execution of the benchmark is asked for."""

from dataclasses import dataclass

from configs.failure import floor_of


@dataclass(frozen=True)
class Settings:
    """A run is `steps` x `groups` x `rollouts`; `concurrent` rollouts are in flight at most."""

    steps: int
    groups: int
    rollouts: int
    rates: tuple[float, ...]
    seed: int
    concurrent: int
    rollout_timeout_s: float
    token_ms: float
    min_step_batch_fraction: float

    @property
    def prompts(self) -> int:
        """Rows of the dataset."""
        return self.steps * self.groups

    @property
    def floor(self) -> int:
        """Groups that a step needs."""
        return floor_of(self.groups, self.min_step_batch_fraction)
