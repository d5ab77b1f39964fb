"""Where a rollout stands, told by its id. A group that is tried again is a new one: its slot is `groups` further on."""

import re
from dataclasses import dataclass

_ROLLOUT = re.compile(r"(?P<run>[^/]+)/step-(?P<step>\d+)/group-(?P<slot>\d+)/rollout-(?P<index>\d+)")


@dataclass(frozen=True)
class Place:
    """Try number `retry` at the group in `slot` of a step."""

    run_id: str
    step: int
    slot: int
    retry: int

    def row(self, groups: int) -> int:
        """The dataset row: every prompt of a run is another."""
        return self.step * groups + self.slot

    def ledger_slot(self, groups: int) -> int:
        """The slot in the ledger, which no other try has."""
        return self.retry * groups + self.slot

    def group_id(self, groups: int) -> str:
        """The group in the ledger."""
        return f"{self.run_id}/step-{self.step}/group-{self.ledger_slot(groups)}"


def place_of(rollout_id: str, groups: int) -> tuple[Place, int]:
    """The place of a rollout's group, and its index there."""
    match = _ROLLOUT.fullmatch(rollout_id)
    if match is None:
        raise ValueError(f"{rollout_id!r} is no rollout of this benchmark")
    retry, slot = divmod(int(match["slot"]), groups)
    return Place(match["run"], int(match["step"]), slot, retry), int(match["index"])
