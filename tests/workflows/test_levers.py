"""What an operator's request on a group comes to: a pure decision, its shape, its preview."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError

from configs.failure import FailureConfig
from workflows.audit import preview
from workflows.group_levers import VERBS, GroupFacts, decide, seals, to_mask
from workflows.levers import LEVER_REFUSED, Decision, check_shape, done, previewed, refused, unchanged
from workflows.messages import (
    RolloutState,
)
from workflows.requests import (
    DropGroup,
    LeverPreview,
    MaskRollouts,
    PauseRun,
    RetryGroup,
)

State = Literal["open", "parked", "sealed", "dropped"]
LETTERS: dict[str, RolloutState] = {"v": "valid", "m": "masked", "l": "lost", "o": "open"}
STATES: list[State] = ["open", "parked", "sealed", "dropped"]


def facts(state: State, letters: str, min_valid: int = 2, on_lost: str = "mask") -> GroupFacts:
    """A group in letters: v(alid), m(asked), l(ost), o(pen)."""
    return GroupFacts(
        group_id="r/step-0/group-0",
        state=state,
        rollouts=tuple(LETTERS[letter] for letter in letters),
        min_valid=min_valid,
        failure=FailureConfig.model_validate({"on_lost_rollout": on_lost}),
    )


def retry(*, fresh: bool = False) -> RetryGroup:
    """A request."""
    return RetryGroup(actor="ann", reason="gym fixed", fresh=fresh)


def mask(*rollouts: int) -> MaskRollouts:
    """A request."""
    return MaskRollouts(actor="ann", reason="gym fixed", rollouts=rollouts)


DROP = DropGroup(actor="ann", reason="gym fixed")


@pytest.mark.parametrize(
    ("state", "outcome", "text"),
    [
        (
            "parked",
            "done",
            "runs rollouts 0, 2 of r/step-0/group-0 again with fresh budgets, and replays what is recorded",
        ),
        ("open", "refused", "r/step-0/group-0 is open, not parked: its rollouts are running"),
        ("sealed", "refused", "is sealed, not parked: its evidence stands"),
        ("dropped", "refused", "is dropped, not parked: while its step is open, retry it through the step"),
    ],
)
def test_a_parked_group_is_retried(state: State, outcome: str, text: str) -> None:
    decision = decide(facts(state, "lvl"), retry())
    assert decision.outcome == outcome
    assert text in decision.detail


def test_a_fresh_retry_says_so() -> None:
    decision = decide(facts("parked", "lv"), retry(fresh=True))
    assert (decision.state, "samples everything again" in decision.detail) == ("open", True)


def test_without_a_lost_rollout_there_is_nothing_to_retry() -> None:
    assert decide(facts("parked", "mm"), retry()) == refused(
        "parked",
        "r/step-0/group-0 is parked and has no lost rollout to run again: drop it, or seal what is valid with mask",
    )


@pytest.mark.parametrize(
    ("state", "outcome", "then"),
    [
        ("open", "done", "dropped"),
        ("parked", "done", "dropped"),
        ("dropped", "unchanged", "dropped"),
        ("sealed", "refused", "sealed"),
    ],
)
def test_a_group_that_has_not_ended_is_dropped(state: State, outcome: str, then: str) -> None:
    decision = decide(facts(state, "lv"), DROP)
    assert (decision.outcome, decision.state) == (outcome, then)


@pytest.mark.parametrize(
    ("group", "request_", "outcome", "state", "text"),
    [
        (facts("parked", "lv"), mask(0), "done", "parked", "masks rollout 0 of r/step-0/group-0; it stays parked"),
        (facts("parked", "vvl", 2, "drop_group"), mask(2), "done", "sealed", "the rest is enough, so it is sealed"),
        (facts("parked", "lvl", 2), mask(), "done", "sealed", "masks rollouts 0, 2 of r/step-0/group-0 and seals it"),
        (facts("parked", "mv", 2), mask(), "done", "sealed", "masks nothing of r/step-0/group-0 and seals it with 1"),
        (facts("open", "ovo"), mask(2), "done", "open", "masks rollout 2 of r/step-0/group-0; it stays open"),
        (facts("open", "ovl"), mask(2), "done", "open", "it stays open"),
        (facts("open", "ovo"), mask(), "done", "sealed", "masks rollouts 0, 2 of r/step-0/group-0 and seals it"),
        (facts("parked", "ml"), mask(0), "unchanged", "parked", "rollout 0 of r/step-0/group-0 is masked already"),
        (facts("sealed", "mmv"), mask(1, 0), "unchanged", "sealed", "rollouts 0, 1 of r/step-0/group-0 are masked"),
        (facts("parked", "lv"), mask(1), "refused", "parked", "rollout 1 of r/step-0/group-0 is valid"),
        (facts("parked", "lv"), mask(0, 1), "refused", "parked", "rollout 1 of r/step-0/group-0 is valid"),
        (facts("parked", "lv"), mask(2), "refused", "parked", "has rollouts 0 to 1, not 2"),
        (facts("parked", "lv"), mask(-1), "refused", "parked", "has rollouts 0 to 1, not -1"),
        (facts("parked", "ll"), mask(), "refused", "parked", "has no valid rollout to train: retry or drop it"),
        (facts("open", "oo"), mask(), "refused", "open", "has no valid rollout to train"),
        (facts("dropped", "lv"), mask(0), "refused", "dropped", "its rollouts stay as they are"),
        (facts("sealed", "lv"), mask(), "refused", "sealed", "its rollouts stay as they are"),
    ],
)
def test_rollouts_that_are_open_or_lost_are_masked(
    group: GroupFacts, request_: MaskRollouts, outcome: str, state: str, text: str
) -> None:
    decision = decide(group, request_)
    assert (decision.outcome, decision.state) == (outcome, state)
    assert text in decision.detail


masks = st.builds(lambda chosen: mask(*chosen), st.lists(st.integers(-2, 9), max_size=4))
requests = st.one_of(st.builds(retry, fresh=st.booleans()), st.just(DROP), masks)
groups = st.builds(
    facts,
    st.sampled_from(STATES),
    st.text("vmlo", min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from(["mask", "drop_group"]),
)


@given(groups, requests)
def test_every_request_has_one_answer_and_only_a_change_moves_the_group(
    group: GroupFacts, request: RetryGroup | DropGroup | MaskRollouts
) -> None:
    decision = decide(group, request)
    assert decision.detail
    if decision.outcome != "done":
        assert decision.state == group.state
    else:
        assert group.state in ("open", "parked")
    if decision.outcome == "refused":
        assert group.group_id in decision.detail


@given(groups, masks)
def test_a_mask_never_touches_evidence(group: GroupFacts, request: MaskRollouts) -> None:
    if decide(group, request).outcome == "done":
        chosen = to_mask(group, request)
        assert {group.rollouts[index] for index in chosen} <= {"open", "lost"}
        assert chosen or seals(group, request)


@given(groups)
def test_a_second_drop_changes_nothing(group: GroupFacts) -> None:
    first = decide(group, DROP)
    if first.outcome == "done":
        after = group.model_copy(update={"state": first.state})
        assert decide(after, DROP).outcome == "unchanged"


@pytest.mark.parametrize(
    ("actor", "reason", "text"),
    [
        ("", "why", "actor is blank: say who asks"),
        (" \n", "why", "actor is blank"),
        ("ann", "\t", "reason is blank: say why; it is kept in the audit"),
        ("x" * 201, "why", "actor has 201 characters; at most 200 are kept"),
        ("ann", "x" * 2001, "reason has 2001 characters; at most 2000 are kept"),
    ],
)
def test_who_asks_and_why_must_be_said(actor: str, reason: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_shape(PauseRun(actor=actor, reason=reason))


def test_a_request_that_fits_is_taken() -> None:
    check_shape(PauseRun(actor="x" * 200, reason="x" * 2000))


def test_a_preview_needs_neither_actor_nor_reason() -> None:
    request = previewed(LeverPreview(verb="retry", arguments={"fresh": True}), VERBS)
    assert isinstance(request, RetryGroup)
    assert request.fresh


@pytest.mark.parametrize(
    ("verb", "arguments", "text"),
    [
        ("abandon", {}, "no verb 'abandon' here; there are: drop, mask, retry"),
        ("retry", {"frsh": True}, "retry: frsh: Extra inputs"),
        ("mask", {"rollouts": ["a"]}, r"mask: rollouts\.0: Input should be a valid integer"),
    ],
)
def test_a_preview_names_what_is_wrong(verb: str, arguments: dict[str, bool | list[str]], text: str) -> None:
    request = LeverPreview.model_validate({"verb": verb, "arguments": arguments})
    with pytest.raises(ValueError, match=text):
        previewed(request, VERBS)


@pytest.mark.parametrize("decision", [done("open", "does it"), unchanged("open", "does it")])
def test_a_preview_says_what_would_happen(decision: Decision) -> None:
    assert preview(decision) == "does it"


def test_a_preview_fails_with_the_refusal() -> None:
    with pytest.raises(ApplicationError, match="it is sealed") as caught:
        preview(refused("sealed", "it is sealed"))
    assert (caught.value.type, caught.value.non_retryable) == (LEVER_REFUSED, True)
