"""The places of a step, one for each prompt that it wants: who stands in each, and when the step closes. Pure.

A place is running (its group has not ended), kept (it was sealed), lending (an earlier step asks for it), seeking (its
group is gone, dropped or set aside or lent, and another one is looked for) or lost. A step closes once no place waits
for anything, enough are kept, and the run gave it the turn. What comes later changes nothing, is refused and counted.
"""

from dataclasses import dataclass, field
from typing import Literal

from configs.failure import FailureConfig, floor_of
from workflows.messages import GroupResult, PromptClaim, SetAside, SlotPlan

PlaceState = Literal["running", "kept", "lending", "seeking", "lost"]


@dataclass
class Place:
    """A place, and the group that stands in it: its prompt, and the group whose place it took."""

    claim: PromptClaim
    replaces: str | None = None
    replacements_used: int = 0
    state: PlaceState = "running"
    group: GroupResult | None = None  # how the group that was here last ended


@dataclass(frozen=True)
class Dropped:
    """A dropped group: its place, its prompt, the group whose place it took, how it ended."""

    place: int
    claim: PromptClaim
    replaces: str | None
    group: GroupResult


@dataclass
class Places:
    """The places of one step. `dropped` holds every dropped group that was not retried, by id; `without_signal` the
    reward of every group that was set aside."""

    places: list[Place] = field(default_factory=list[Place])
    dropped: dict[str, Dropped] = field(default_factory=dict[str, Dropped])
    without_signal: dict[str, float] = field(default_factory=dict[str, float])
    replaced: int = 0
    promoted: int = 0
    given_away: int = 0
    refused_late: int = 0
    closed: bool = False
    _kept: list[int] = field(default_factory=list[int])  # in the order in which they were kept

    @classmethod
    def planned(cls, slots: tuple[SlotPlan, ...], set_aside: tuple[SetAside, ...] = ()) -> "Places":
        """As the ledger has them."""
        places = cls(without_signal={group.group_id: group.reward for group in set_aside})
        for index, slot in enumerate(slots):
            place = Place(slot.claim, None if slot.given_away else slot.replaces, slot.replacements_used)
            places.places.append(place)
            if slot.given_away or slot.set_aside:
                place.state = "seeking"
            elif slot.lent is not None:
                place.state, place.group = "kept", slot.lent
                places.promoted += 1
                places._kept.append(index)
        return places

    @property
    def kept(self) -> list[GroupResult]:
        """The groups that train, in the order in which they were kept."""
        found = [self.places[index].group for index in self._kept]
        return [group for group in found if group is not None]

    @property
    def shortfall(self) -> int:
        """Places that are lost."""
        return sum(place.state == "lost" for place in self.places)

    @property
    def is_settled(self) -> bool:
        """Whether no place waits for anything."""
        return all(place.state in ("kept", "lost") for place in self.places)

    def floor_holds(self, failure: FailureConfig) -> bool:
        """Whether the places that are not lost can still make a step."""
        count = len(self.places)
        return count - self.shortfall >= floor_of(count, failure.min_step_batch_fraction)

    def may_close(self, failure: FailureConfig, *, has_turn: bool) -> bool:
        """Whether everything that the step waits for is there."""
        return has_turn and self.is_settled and self.floor_holds(failure)

    def close(self) -> None:
        """From now on nothing changes."""
        self.closed = True

    def keep(self, index: int, group: GroupResult) -> bool:
        """The group of a place was sealed."""
        if not self._moved(index, "running", "kept"):
            return False
        self.places[index].group = group
        self._kept.append(index)
        return True

    def drop(self, index: int, group: GroupResult, replacements: int) -> bool:
        """The group of a place was dropped: another one is looked for, or the place is lost."""
        place = self.places[index]
        if not self._moved(index, "running", "seeking" if place.replacements_used < replacements else "lost"):
            return False
        place.group = group
        self.dropped[group.group_id] = Dropped(index, place.claim, place.replaces, group)
        return True

    def set_aside(self, index: int, group: GroupResult) -> bool:
        """The group of a place carries no signal: another one is looked for, whatever the step had to replace so far.
        It is never kept, so it is never lent."""
        if not self._moved(index, "running", "seeking"):
            return False
        self.places[index].group = group
        self.without_signal[group.group_id] = group.mean_reward or 0.0
        return True

    def promote(self, index: int, group: GroupResult, replaces: str) -> bool:
        """A group of a later step takes a place."""
        if not self._moved(index, "seeking", "kept"):
            return False
        place = self.places[index]
        place.group, place.replaces = group, replaces
        self.promoted += 1
        self._kept.append(index)
        return True

    def replace(self, index: int, claim: PromptClaim, replaces: str) -> bool:
        """A spare prompt takes a place. Where it follows a group that was set aside, nothing was lost."""
        if not self._moved(index, "seeking", "running"):
            return False
        place = self.places[index]
        place.claim, place.replaces = claim, replaces
        if replaces not in self.without_signal:
            place.replacements_used += 1
            self.replaced += 1
        return True

    def give_up(self, index: int) -> bool:
        """Nothing is looked for any more."""
        return self._moved(index, "seeking", "lost")

    def lend(self) -> int | None:
        """The place whose group an earlier step may have: the first kept one that took nobody's place, so that the way
        back to its own stays known. None: there is none, or no more."""
        if self.closed:
            self.refused_late += 1
            return None
        index = next((index for index in self._kept if self.places[index].replaces is None), None)
        if index is not None:
            self.places[index].state = "lending"
        return index

    def give_away(self, index: int, replacements_used: int) -> bool:
        """The group of a place is trained by an earlier step, which had used so many replacements for it."""
        if not self._moved(index, "lending", "seeking"):
            return False
        self.places[index].replacements_used = replacements_used
        self._kept.remove(index)
        self.given_away += 1
        return True

    def keep_after_all(self, index: int) -> bool:
        """The group of a place stays."""
        return self._moved(index, "lending", "kept")

    def retry(self, group_id: str) -> int | None:
        """A dropped group whose place is lost runs again in it; the place, or None where that cannot be."""
        found = self.dropped.get(group_id)
        if found is None or not self._moved(found.place, "lost", "running"):
            return None
        del self.dropped[group_id]
        place = self.places[found.place]
        place.claim, place.replaces = found.claim, found.replaces
        return found.place

    def _moved(self, index: int, from_state: PlaceState, to_state: PlaceState) -> bool:
        if self.closed or self.places[index].state != from_state:
            self.refused_late += 1
            return False
        self.places[index].state = to_state
        return True
