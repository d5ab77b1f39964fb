"""What retry, drop and mask come to for a prompt group: pure decisions over the states of its rollouts."""

from collections.abc import Iterable
from typing import Literal

from configs.failure import FailureConfig
from workflows.levers import Decision, done, refused, unchanged
from workflows.messages import (
    Message,
    RolloutState,
)
from workflows.requests import (
    DropGroup,
    Lever,
    MaskRollouts,
    RetryGroup,
)
from workflows.settling import can_train, counted

GroupRequest = RetryGroup | DropGroup | MaskRollouts

VERBS: dict[str, type[GroupRequest]] = {"retry": RetryGroup, "drop": DropGroup, "mask": MaskRollouts}


class GroupFacts(Message):
    """What a decision about a group looks at: its state and its rollouts' by index, with every decision before.
    `good_ending` is how it ends if what is valid now trains: without a signal it is set aside."""

    group_id: str
    state: Literal["open", "parked", "sealed", "dropped", "set_aside"]
    rollouts: tuple[RolloutState, ...]
    min_valid: int
    failure: FailureConfig
    good_ending: Literal["sealed", "set_aside"] = "sealed"


def decide(facts: GroupFacts, request: Lever) -> Decision:
    """What a request would do now."""
    match request:
        case RetryGroup():
            return _retry(facts, request)
        case DropGroup():
            return _drop(facts)
        case MaskRollouts():
            return _mask(facts, request)
        case _:
            raise TypeError(f"no request of a group: {type(request).__name__}")


def to_mask(facts: GroupFacts, request: MaskRollouts) -> tuple[int, ...]:
    """The rollouts that a request masks: those named, or all that are not valid; not those that are masked already."""
    chosen = sorted(set(request.rollouts)) or range(len(facts.rollouts))
    return tuple(index for index in chosen if facts.rollouts[index] in ("open", "lost"))


def seals(facts: GroupFacts, request: MaskRollouts) -> bool:
    """Whether the group is sealed with what is valid, whatever `min_valid_rollouts_per_group` asks for."""
    return not request.rollouts and "valid" in facts.rollouts


def _retry(facts: GroupFacts, request: RetryGroup) -> Decision:
    group_id, state = facts.group_id, facts.state
    if state != "parked":
        hint = {
            "open": "its rollouts are running; wait, drop it, or mask a rollout",
            "sealed": "its evidence stands; `onbelay group replay` makes a diagnostic copy",
            "dropped": "while its step is open, retry it through the step; `onbelay group retry` does so",
            "set_aside": "its evidence stands, and another prompt takes its place; `onbelay group replay` makes a "
            "diagnostic copy",
        }
        return refused(state, f"{group_id} is {state}, not parked: {hint[state]}")
    lost = _where(facts.rollouts, "lost")
    if not lost:
        return refused(
            state,
            f"{group_id} is parked and has no lost rollout to run again: drop it, or seal what is valid with mask",
        )
    how = "samples everything again" if request.fresh else "replays what is recorded"
    return done("open", f"runs {_named(lost)} of {group_id} again with fresh budgets, and {how}")


def _drop(facts: GroupFacts) -> Decision:
    if facts.state == "dropped":
        return unchanged("dropped", f"{facts.group_id} is dropped already")
    if facts.state == "sealed":
        return refused("sealed", f"{facts.group_id} is sealed: its evidence stands and its step trains it")
    if facts.state == "set_aside":
        return refused("set_aside", f"{facts.group_id} is set_aside: its evidence stands and nothing of it trains")
    return done("dropped", f"drops {facts.group_id}, which is {facts.state}; no budget counts it")


def _mask(facts: GroupFacts, request: MaskRollouts) -> Decision:
    group_id, state, size = facts.group_id, facts.state, len(facts.rollouts)
    beyond = [index for index in request.rollouts if not 0 <= index < size]
    if beyond:
        return refused(state, f"{group_id} has rollouts 0 to {size - 1}, not {', '.join(map(str, beyond))}")
    valid = [index for index in request.rollouts if facts.rollouts[index] == "valid"]
    if valid:
        return refused(state, f"{_named(valid)} of {group_id} {_is(valid)} valid: the evidence is sealed and stands")
    chosen = to_mask(facts, request)
    if request.rollouts and not chosen:
        named = sorted(set(request.rollouts))
        return unchanged(state, f"{_named(named)} of {group_id} {_is(named)} masked already")
    if state in ("sealed", "dropped", "set_aside"):
        return refused(state, f"{group_id} is {state}: its rollouts stay as they are")
    if not request.rollouts and not seals(facts, request):
        return refused(state, f"{group_id} is {state} and has no valid rollout to train: retry or drop it")
    masks = f"masks {_named(chosen)} of {group_id}" if chosen else f"masks nothing of {group_id}"
    if seals(facts, request):
        valid_ones = facts.rollouts.count("valid")
        if facts.good_ending == "set_aside":
            return done("set_aside", f"{masks} and sets it aside: its {valid_ones} valid have equal rewards")
        return done("sealed", f"{masks} and seals it with {valid_ones} valid")
    after: list[RolloutState] = [
        "masked" if index in chosen else rollout for index, rollout in enumerate(facts.rollouts)
    ]
    if state == "parked" and can_train(counted(after), facts.min_valid, facts.failure):
        return done(facts.good_ending, f"{masks}; the rest is enough, so it is {facts.good_ending}")
    return done(state, f"{masks}; it stays {state}")


def _where(rollouts: Iterable[RolloutState], state: RolloutState) -> list[int]:
    return [index for index, rollout in enumerate(rollouts) if rollout == state]


def _named(indices: Iterable[int]) -> str:
    several = list(indices)
    return f"rollout{'' if len(several) == 1 else 's'} {', '.join(map(str, several))}"


def _is(indices: Iterable[int]) -> str:
    return "is" if len(list(indices)) == 1 else "are"
