"""What operators ask of a group, a step or a run: the argument of an update, its preview, and the answer."""

from pydantic import Field, JsonValue

from workflows.messages import Message


class Lever(Message):
    """What an operator's request carries: who asks, and why. Both are kept in the audit."""

    actor: str = Field(description="Who asks.")
    reason: str = Field(description="Why; it is kept in the audit.")


class RetryGroup(Lever):
    """Run the lost rollouts again, with fresh budgets."""

    fresh: bool = Field(default=False, description="Sample everything again, replay nothing.")


class DropGroup(Lever):
    """Give the group up."""


class MaskRollouts(Lever):
    """Let rollouts keep their place without a gradient or a vote."""

    rollouts: tuple[int, ...] = Field(default=(), description="Indices; none: every rollout that is not valid.")


class RetryDroppedGroup(RetryGroup):
    """Run a dropped group of an open step again."""

    group_id: str = Field(description="The dropped group.")


class PauseRun(Lever):
    """Finish the step that trains, then wait."""


class ResumeRun(Lever):
    """Go on after a pause."""


class StopRun(Lever):
    """End the run after a step; None: after the one in flight."""

    after_step: int | None = Field(default=None, description="The last step.")


class SetBudget(Lever):
    """Change drop budgets of the run; None leaves one as it is."""

    max_consecutive_dropped_prompts: int | None = None
    max_skipped_prompts: int | None = None


class SetFloor(Lever):
    """Change how many groups make a step."""

    min_step_batch_fraction: float


class LeverPreview(Message):
    """Ask what a request would do, without doing it."""

    verb: str
    arguments: dict[str, JsonValue]


class LeverDone(Message):
    """What a request did. `changed` is false where it asked for what is so already; `state` is the present one."""

    target: str
    verb: str
    changed: bool
    state: str
    detail: str
