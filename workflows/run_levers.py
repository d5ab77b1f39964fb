"""What an operator may ask of a run: pause, resume, stop, other budgets, another floor. Pure."""

from configs.failure import FailureConfig
from workflows.levers import Decision, done, refused, unchanged
from workflows.messages import (
    BudgetState,
    Message,
    RunInput,
)
from workflows.requests import (
    Lever,
    PauseRun,
    ResumeRun,
    SetBudget,
    SetFloor,
    StopRun,
)

_BUDGETS = (
    ("max_consecutive_dropped_prompts", "consecutive_drops"),
    ("max_skipped_prompts", "skipped_prompts"),
)


class RunFacts(Message):
    """What the decisions look at. `trains`: a step has its turn; `ended`: the run is over and takes no request."""

    run: RunInput
    trains: bool
    ended: bool

    @property
    def state(self) -> str:
        """In a word or two."""
        if self.ended:
            return "ended"
        if self.run.stop_after_step is not None:
            return f"stopping after step {self.run.stop_after_step}"
        return "paused" if self.run.paused else "running"

    def last_step(self, request: StopRun) -> int:
        """The step that a stop ends with: the one asked for, the one that trains, or the last one that was trained."""
        if request.after_step is not None:
            return request.after_step
        return self.run.next_step if self.trains else self.run.next_step - 1


def decide(facts: RunFacts, request: Lever, used: BudgetState) -> Decision:
    """What a request comes to; `used` are the drop counters."""
    if facts.ended:
        return refused(facts.state, "the run is at its end; `onbelay run resume` goes on with it once it has ended")
    match request:
        case PauseRun():
            return decide_pause(facts)
        case ResumeRun():
            return decide_resume(facts)
        case StopRun():
            return decide_stop(facts, request)
        case SetBudget():
            return decide_budget(facts, request, used)
        case SetFloor():
            return decide_floor(facts, request)
        case _:
            raise TypeError(f"{type(request).__name__} is no request to a run")


def run_changes(facts: RunFacts, request: Lever) -> dict[str, object]:
    """What a request to pause, resume or stop changes in the run's state."""
    match request:
        case PauseRun():
            return {"paused": True, "because": f"paused by {request.actor}: {request.reason}"}
        case StopRun():
            because = f"stopped by {request.actor}: {request.reason}"
            return {"stop_after_step": facts.last_step(request), "paused": False, "because": because}
        case _:
            return {"paused": False, "because": None}


def decide_pause(facts: RunFacts) -> Decision:
    """Finish the step that trains, then wait."""
    if facts.run.paused:
        return unchanged("paused", f"the run is paused before step {facts.run.next_step}")
    if facts.trains:
        return done("paused", f"the run finishes step {facts.run.next_step}, then waits for resume")
    return done("paused", f"the run waits before step {facts.run.next_step} for resume")


def decide_resume(facts: RunFacts) -> Decision:
    """Go on."""
    if not facts.run.paused:
        return unchanged(facts.state, f"the run is not paused; step {facts.run.next_step} is the one in turn")
    return done("running", f"the run goes on with step {facts.run.next_step}")


def decide_stop(facts: RunFacts, request: StopRun) -> Decision:
    """End the run after a step. A paused run ends, too."""
    last, following = facts.last_step(request), facts.run.next_step
    if request.after_step is not None and last < following:
        return refused(
            facts.state, f"step {last} is over; the next one is {following}: stop after {following} or later"
        )
    state = f"stopping after step {last}" if last >= following else "stopping"
    if facts.run.stop_after_step == last and not facts.run.paused:
        return unchanged(state, f"the run stops after step {last} already")
    if last < following:
        return done(state, f"the run stops now, before step {following}")
    return done(state, f"the run stops after step {last}; what later steps have sampled is kept")


def decide_budget(facts: RunFacts, request: SetBudget, used: BudgetState) -> Decision:
    """Other drop budgets, none of them below what is used."""
    changes = budget_changes(request)
    if not changes:
        return refused(facts.state, f"no budget is named; there are {' and '.join(key for key, _ in _BUDGETS)}")
    for key, counter in _BUDGETS:
        spent = getattr(used, counter)
        if key in changes and changes[key] < spent:
            return refused(
                facts.state, f"{key}={changes[key]} is below what is used: {spent}; the run would end at once"
            )
    text = ", ".join(f"{key}={value}" for key, value in changes.items())
    if all(getattr(facts.run.policy.failure, key) == value for key, value in changes.items()):
        return unchanged(facts.state, f"{text} holds already")
    return done(facts.state, f"{text} holds from now on (used: {_used(used)})")


def decide_floor(facts: RunFacts, request: SetFloor) -> Decision:
    """Another fraction of groups that makes a step, above 0 and at most 1."""
    fraction, failure = request.min_step_batch_fraction, facts.run.policy.failure
    if not 0 < fraction <= 1:
        return refused(
            facts.state,
            f"min_step_batch_fraction={fraction} is not above 0 and at most 1; it is {failure.min_step_batch_fraction}",
        )
    if fraction == failure.min_step_batch_fraction:
        return unchanged(facts.state, f"min_step_batch_fraction={fraction} holds already")
    return done(facts.state, f"min_step_batch_fraction={fraction} holds from now on, for steps in flight, too")


def budget_changes(request: SetBudget) -> dict[str, int]:
    """The budgets that a request names."""
    asked = {key: getattr(request, key) for key, _ in _BUDGETS}
    return {key: value for key, value in asked.items() if value is not None}


def changed(failure: FailureConfig, changes: dict[str, int] | dict[str, float]) -> FailureConfig:
    """The section with new values."""
    return FailureConfig.model_validate({**failure.model_dump(), **changes})


def _used(used: BudgetState) -> str:
    return ", ".join(f"{getattr(used, counter)} of {key}" for key, counter in _BUDGETS)
