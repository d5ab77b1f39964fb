"""When a service that ended is started again, and when that is given up. Pure rules."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Waits double from `first_wait_s` to `longest_wait_s`; having been ready for `healthy_s` forgets earlier failures.

    While the stack comes up, a service may fail `attempts_at_start` times: a wrong setting should show soon.
    """

    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    healthy_s: float = 60.0
    attempts_at_start: int = 3
    failures_in_a_row: int = 20

    def failures_after(self, failures: int, ready_s: float) -> int:
        """The count of failures in a row after one more, of a service that had been ready for so long."""
        return 1 if ready_s >= self.healthy_s else failures + 1

    def wait_s(self, failures: int) -> float:
        """The wait before the next start after so many failures in a row (at least one)."""
        doublings = min(failures - 1, 30)  # beyond, the product is only large
        return float(min(self.longest_wait_s, self.first_wait_s * 2**doublings))

    def gives_up(self, failures: int, was_ready: bool) -> bool:
        """Whether the service is not started again."""
        return failures >= (self.failures_in_a_row if was_ready else self.attempts_at_start)
