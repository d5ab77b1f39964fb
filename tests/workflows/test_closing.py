"""The places of a step: who stands in them, what is lost, and when the step closes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.failure import FailureConfig, floor_of
from workflows.closing import Places
from workflows.messages import GroupResult, PromptClaim, SetAside, SlotPlan
from workflows.step_levers import decide_retry


def group(slot: int, step: int = 5, state: str = "sealed") -> GroupResult:
    """A group that ended."""
    return GroupResult.model_validate(
        {
            "group_id": f"r/step-{step}/group-{slot}",
            "slot": slot,
            "prompt_id": f"prompt-{step}-{slot}",
            "state": state,
            "valid": 2,
            "masked": 0,
            "lost": 0,
            "mean_reward": 0.5,
        }
    )


def claim(slot: int) -> PromptClaim:
    """A claim of a prompt."""
    return PromptClaim(slot=slot, prompt_id=f"prompt-{slot}", row_index=slot)


def places_of(count: int) -> Places:
    """A step that has just begun."""
    return Places.planned(tuple(SlotPlan(claim=claim(slot)) for slot in range(count)))


def test_a_step_closes_on_its_turn_once_every_place_is_kept() -> None:
    failure, places = FailureConfig(), places_of(2)
    assert places.keep(0, group(0))
    assert not places.may_close(failure, has_turn=True)
    assert places.keep(1, group(1))
    assert places.may_close(failure, has_turn=True)
    assert not places.may_close(failure, has_turn=False)


def test_a_step_shrinks_to_its_floor_and_no_further() -> None:
    failure, places = FailureConfig(min_step_batch_fraction=0.75), places_of(4)
    for slot in (0, 1):
        places.keep(slot, group(slot))
    places.drop(2, group(2, state="dropped"), replacements=0)
    assert (places.shortfall, places.floor_holds(failure)) == (1, True)
    places.drop(3, group(3, state="dropped"), replacements=0)
    assert not places.floor_holds(failure)
    assert not places.may_close(failure, has_turn=True)
    assert places.may_close(FailureConfig(min_step_batch_fraction=0.5), has_turn=True)


def test_a_drop_after_the_close_is_refused_and_counted() -> None:
    failure, places = FailureConfig(), places_of(1)
    places.keep(0, group(0))
    places.close()
    assert not places.drop(0, group(0, state="dropped"), replacements=1)
    assert not places.keep(0, group(0))
    assert not places.promote(0, group(3, step=7), "r/step-5/group-0")
    assert places.lend() is None
    assert places.retry("r/step-5/group-0") is None
    assert (places.refused_late, places.shortfall, len(places.kept)) == (4, 0, 1)
    assert places.may_close(failure, has_turn=True)


def test_the_first_kept_group_of_a_later_step_takes_the_place_and_the_lender_gets_a_spare() -> None:
    """Step 5 loses a group, step 7 has ready ones: the lender owes the place now, its replacements included."""
    borrower, lender = places_of(2), places_of(2)
    lost = group(0, state="dropped")
    borrower.drop(0, lost, replacements=1)
    lender.keep(1, group(1, step=7))
    lender.keep(0, group(0, step=7))

    asked = lender.lend()
    assert asked == 1
    assert lender.give_away(asked, replacements_used=borrower.places[0].replacements_used)
    assert borrower.promote(0, group(1, step=7), lost.group_id)
    assert lender.replace(asked, claim(2), replaces="r/step-7/group-1")
    assert (borrower.promoted, lender.replaced, borrower.shortfall, lender.shortfall) == (1, 1, 0, 0)

    lender.drop(asked, group(2, step=7, state="dropped"), replacements=1)
    assert (lender.shortfall, borrower.shortfall) == (1, 0)
    assert [kept.group_id for kept in lender.kept] == ["r/step-7/group-0"]


def test_without_a_replacement_left_nothing_is_borrowed() -> None:
    places = places_of(1)
    assert places.drop(0, group(0, state="dropped"), replacements=0)
    assert places.shortfall == 1
    assert not places.promote(0, group(0, step=7), "r/step-5/group-0")


def test_a_group_that_the_ledger_does_not_let_go_stays_where_it_was() -> None:
    places = places_of(2)
    places.keep(0, group(0))
    places.keep(1, group(1))
    asked = places.lend()
    assert asked == 0
    assert not places.is_settled
    assert places.keep_after_all(asked)
    assert [kept.slot for kept in places.kept] == [0, 1]


def test_a_group_that_took_a_place_is_not_lent() -> None:
    places = places_of(2)
    places.drop(0, group(0, state="dropped"), replacements=1)
    places.replace(0, claim(2), "r/step-5/group-0")
    places.keep(0, group(2))
    assert places.lend() is None
    places.keep(1, group(1))
    assert places.lend() == 1


def test_places_are_what_the_ledger_says() -> None:
    lent = group(3, step=7)
    places = Places.planned(
        (
            SlotPlan(claim=claim(0)),
            SlotPlan(claim=claim(1), lent=lent, replaces="r/step-5/group-1"),
            SlotPlan(claim=claim(2), given_away=True, replaces="r/step-4/group-0"),
            SlotPlan(claim=claim(4), replaces="r/step-5/group-3", replacements_used=1),
        )
    )
    assert [place.state for place in places.places] == ["running", "kept", "seeking", "running"]
    assert (places.kept, places.promoted, places.places[3].replacements_used) == ([lent], 1, 1)
    assert places.places[2].replaces is None


def test_a_group_without_signal_leaves_its_place_and_costs_no_replacement() -> None:
    failure, places = FailureConfig(), places_of(1)
    assert places.set_aside(0, group(0, state="set_aside"))
    assert (places.places[0].state, places.shortfall, places.kept) == ("seeking", 0, [])
    assert places.lend() is None
    assert places.replace(0, claim(1), "r/step-5/group-0")
    assert (places.places[0].replacements_used, places.replaced) == (0, 0)
    assert places.drop(0, group(1, state="dropped"), replacements=1)
    assert places.replace(0, claim(2), "r/step-5/group-1")
    assert (places.places[0].replacements_used, places.replaced) == (1, 1)
    assert places.keep(0, group(2))
    assert places.may_close(failure, has_turn=True)
    assert places.without_signal == {"r/step-5/group-0": 0.5}
    places.close()
    assert not places.set_aside(0, group(2, state="set_aside"))
    assert (places.refused_late, list(places.without_signal)) == (1, ["r/step-5/group-0"])


def test_a_resumed_step_knows_what_it_set_aside() -> None:
    known = (SetAside(group_id="r/step-5/group-0", reward=1.0), SetAside(group_id="r/step-5/group-1", reward=0.0))
    slots = (
        SlotPlan(claim=claim(0), set_aside=True),
        SlotPlan(claim=claim(2), replaces="r/step-5/group-1"),
    )
    places = Places.planned(slots, known)
    assert [place.state for place in places.places] == ["seeking", "running"]
    assert places.without_signal == {"r/step-5/group-0": 1.0, "r/step-5/group-1": 0.0}
    places.replace(0, claim(3), "r/step-5/group-0")
    assert (places.replaced, places.places[0].replacements_used) == (0, 0)
    assert "group replay r/step-5/group-0" in (
        decide_retry(5, "r/step-5/group-0", "r/step-5/group-", places, draining=False).detail
    )


@pytest.mark.parametrize("asked", ["r/step-4/group-0", "r/step-5/group-9", "r/step-5/group-0"])
def test_only_a_dropped_group_of_the_step_is_retried(asked: str) -> None:
    places = places_of(2)
    places.keep(0, group(0))
    assert decide_retry(5, asked, "r/step-5/group-", places, draining=False).outcome == "refused"


def test_a_retry_is_refused_when_the_step_is_closed_drained_or_the_place_is_taken() -> None:
    places = places_of(1)
    places.drop(0, group(0, state="dropped"), replacements=1)
    asked = "r/step-5/group-0"
    assert "is being looked for" in decide_retry(5, asked, "r/step-5/group-", places, draining=False).detail
    places.replace(0, claim(1), asked)
    assert "has its place already" in decide_retry(5, asked, "r/step-5/group-", places, draining=False).detail
    places.drop(0, group(1, state="dropped"), replacements=1)
    refusal = decide_retry(5, asked, "r/step-5/group-", places, draining=False).detail
    assert "gave its place to r/step-5/group-1, which was dropped, too" in refusal
    asked = "r/step-5/group-1"
    assert decide_retry(5, asked, "r/step-5/group-", places, draining=False).outcome == "done"
    assert "when the run is resumed" in decide_retry(5, asked, "r/step-5/group-", places, draining=True).detail
    places.close()
    assert "group replay r/step-5/group-1" in decide_retry(5, asked, "r/step-5/group-", places, draining=False).detail


class AnyOrder(RuleBasedStateMachine):
    """Groups end, are set aside, replaced, lent, borrowed and retried in any order; a model counts along."""

    @initialize(count=st.integers(1, 5), replacements=st.integers(0, 2), fraction=st.sampled_from([0.3, 0.5, 0.9, 1.0]))
    def begin(self, count: int, replacements: int, fraction: float) -> None:
        """A step of some places."""
        self.places, self.count, self.replacements = places_of(count), count, replacements
        self.failure = FailureConfig(min_step_batch_fraction=fraction)
        self.next_slot = count
        self.begun, self.taken, self.given, self.late, self.refilled = count, 0, 0, 0, 0
        self.gone: dict[int, str] = {}  # place -> the group that left it

    def _some(self, state: str, data: st.DataObject) -> int | None:
        found = [index for index, place in enumerate(self.places.places) if place.state == state]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data(), dropped=st.booleans())
    def a_group_ends(self, data: st.DataObject, dropped: bool) -> None:
        """Well or not."""
        index = self._some("running", data)
        if index is None:
            return
        ended = group(self.places.places[index].claim.slot, state="dropped" if dropped else "sealed")
        if dropped:
            used = self.places.places[index].replacements_used
            assert self.places.drop(index, ended, self.replacements)
            assert self.places.places[index].state == ("seeking" if used < self.replacements else "lost")
            self.gone[index] = ended.group_id
        else:
            assert self.places.keep(index, ended)

    @rule(data=st.data())
    def a_group_ends_without_a_signal(self, data: st.DataObject) -> None:
        """Its place looks for the next prompt, however many replacements it has had."""
        index = self._some("running", data)
        if index is None:
            return
        ended = group(self.places.places[index].claim.slot, state="set_aside")
        used = self.places.places[index].replacements_used
        assert self.places.set_aside(index, ended)
        assert (self.places.places[index].state, self.places.places[index].replacements_used) == ("seeking", used)
        self.gone[index] = ended.group_id

    @rule(data=st.data(), borrows=st.booleans())
    def a_place_is_filled(self, data: st.DataObject, borrows: bool) -> None:
        """By a group of a later step or by a spare prompt."""
        index = self._some("seeking", data)
        if index is None:
            return
        refills = self.gone[index] in self.places.without_signal
        if borrows and not refills:
            assert self.places.promote(index, group(100 + self.taken, step=9), self.gone[index])
            self.taken += 1
        else:
            assert self.places.replace(index, claim(self.next_slot), self.gone[index])
            self.next_slot += 1
            self.begun += 1
            self.refilled += refills

    @rule(lets_go=st.booleans(), used=st.integers(0, 2))
    def an_earlier_step_asks(self, lets_go: bool, used: int) -> None:
        """The ledger lets the group go or not."""
        index = self.places.lend()
        assert index is None or self.places.places[index].replaces is None
        if index is None:
            self.late += self.places.closed
            return
        ended = self.places.places[index].group
        assert ended is not None
        if lets_go:
            assert self.places.give_away(index, used)
            self.gone[index] = ended.group_id
            self.given += 1
        else:
            assert self.places.keep_after_all(index)

    @rule(data=st.data())
    def an_operator_retries(self, data: st.DataObject) -> None:
        """Any dropped group; it runs only where its place is lost."""
        if not self.places.dropped:
            return
        asked = data.draw(st.sampled_from(sorted(self.places.dropped)))
        found = self.places.dropped[asked]
        allowed = decide_retry(5, asked, "r/step-5/group-", self.places, draining=False).outcome == "done"
        if allowed:
            assert self.places.retry(asked) == found.place

    @precondition(lambda self: self.places.may_close(self.failure, has_turn=True) and not self.places.closed)
    @rule()
    def the_step_closes(self) -> None:
        """On its turn."""
        self.places.close()

    @precondition(lambda self: self.places.closed)
    @rule(index=st.integers(0, 4))
    def something_comes_late(self, index: int) -> None:
        """It changes nothing."""
        before = [place.state for place in self.places.places]
        assert not self.places.drop(index % self.count, group(0, state="dropped"), 1)
        self.late += 1
        assert [place.state for place in self.places.places] == before

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        """What was begun or taken is kept, dropped, given away, or runs."""
        if not hasattr(self, "places"):
            return
        states = [place.state for place in self.places.places]
        assert len(self.places.kept) == states.count("kept") == len({g.group_id for g in self.places.kept})
        assert self.begun + self.taken == (
            len(self.places.kept)
            + len(self.places.dropped)
            + len(self.places.without_signal)
            + self.given
            + states.count("running")
        )
        assert not {kept.group_id for kept in self.places.kept} & set(self.places.without_signal)
        assert self.places.shortfall == states.count("lost")
        assert (self.places.replaced, self.places.promoted, self.places.given_away) == (
            self.begun - self.count - self.refilled,
            self.taken,
            self.given,
        )
        assert self.places.refused_late == self.late

    @invariant()
    def a_closed_step_has_its_floor(self) -> None:
        """And waits for nothing."""
        if hasattr(self, "places") and self.places.closed:
            assert self.places.is_settled
            assert len(self.places.kept) >= floor_of(self.count, self.failure.min_step_batch_fraction)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50)
