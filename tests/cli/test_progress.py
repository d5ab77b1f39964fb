"""Plain progress lines: everything once, with names and reasons."""

from datetime import UTC, datetime

from storage.records import AttemptRecord, EvaluationRecord, GroupRecord, RolloutRecord
from storage.summaries import RunSummary
from workers.cli.progress import Seen, View, news

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def summary(state: str, steps: int) -> RunSummary:
    counts = ("dispatched", "trained", "dropped", "set_aside", "parked", "open", "promoted", "replaced", "refused_late")
    return RunSummary.model_validate(
        {
            "run_id": "r",
            "state": state,
            "steps_applied": steps,
            "refits": 0,
            "policy_version": 0,
            "groups": dict.fromkeys(counts, 0),
            "rollouts": {"dispatched": 0, "valid": 0, "masked": 0, "lost": 0, "open": 0},
            "attempts": {"total": 0, "failed": 0},
            "rows": {"trained": 0, "segments_max": 0},
            "model_calls": {"generated": 0, "replayed": 0},
            "tokens": {"generated": 0, "replayed": 0, "trained": 0},
            "reward_by_step": [],
            "identity_holds": True,
        }
    )


def failed_group() -> GroupRecord:
    attempt = AttemptRecord(
        rollout_id="r/step-0/group-0/rollout-0",
        attempt=0,
        state="failed",
        worker="w",
        boundary="agent",
        bucket="infra",
        failure_class="AgentFailed",
        cause="HTTP 500",
        started_at=NOW,
        ended_at=NOW,
    )
    rollout = RolloutRecord(
        rollout_id=attempt.rollout_id,
        group_id="r/step-0/group-0",
        index=0,
        state="lost",
        current_attempt=0,
        settled_attempt=None,
        reward=None,
        truncated=False,
        reason="AgentFailed",
        policy_version_min=None,
        policy_version_max=None,
        evidence_digest=None,
        segments=0,
        settled_at=NOW,
        attempts=(attempt,),
    )
    return GroupRecord(
        group_id="r/step-0/group-0",
        run_id="r",
        step=0,
        slot=0,
        purpose="train",
        prompt_id="p",
        row_index=0,
        num_rollouts=1,
        train_step=0,
        replaces=None,
        copy_of=None,
        ended_order=1,
        state="dropped",
        bucket="infra",
        reason="0 of 1 rollouts are valid",
        created_at=NOW,
        updated_at=NOW,
        rollouts=(rollout,),
    )


def test_failures_groups_evaluations_steps_and_the_end_are_told_once() -> None:
    evaluation = EvaluationRecord(run_id="r", version=1, mean_reward=0.5, rollouts=16, recorded_at=NOW)
    view = View(
        summary=summary("failed", 1),
        reason="a budget is used up",
        metrics={0: {"train/reward": 0.25, "train/loss": 0.5}},
        evaluations=[evaluation],
        groups=[failed_group()],
    )
    seen = Seen()

    lines = news(view, seen)

    assert lines == [
        "  r/step-0/group-0/rollout-0 attempt 0 failed: AgentFailed: HTTP 500",
        "  r/step-0/group-0 dropped (0 of 1 rollouts are valid)",
        "evaluation of policy-1: mean reward 0.500 over 16 rollouts of prompts that are never trained",
        "step 0 applied  reward 0.250  loss 0.5000",
        "run r failed: a budget is used up",
    ]
    assert news(view, seen) == ["run r failed: a budget is used up"]


def test_groups_of_steps_that_pass_between_two_looks_are_told_before_their_steps() -> None:
    rollout = failed_group().rollouts[0].model_copy(update={"state": "valid", "reward": 0.5, "attempts": ()})

    def group(step: int, state: str) -> GroupRecord:
        name = f"r/step-{step}/group-0"
        changes = {"group_id": name, "train_step": step, "state": state, "reason": None, "rollouts": (rollout,)}
        return failed_group().model_copy(update=changes)

    seen = Seen()
    first = View(summary("running", 0), None, {}, [], [group(0, "sealed")])
    assert news(first, seen) == ["  r/step-0/group-0 sealed: rewards 0.50"]
    groups = [group(0, "trained"), group(1, "trained"), group(2, "sealed")]
    rewards: dict[int, dict[str, float]] = {step: {"train/reward": 0.5} for step in (0, 1)}
    assert news(View(summary("running", 2), None, rewards, [], groups), seen) == [
        "  r/step-1/group-0 trained: rewards 0.50",
        "step 0 applied  reward 0.500",
        "step 1 applied  reward 0.500",
        "  r/step-2/group-0 sealed: rewards 0.50",
    ]


def test_what_killed_many_attempts_at_once_is_told_once() -> None:
    group = failed_group()
    (rollout,) = group.rollouts
    (attempt,) = rollout.attempts
    others = tuple(
        rollout.model_copy(
            update={
                "rollout_id": f"{group.group_id}/rollout-{index}",
                "attempts": (attempt.model_copy(update={"rollout_id": f"{group.group_id}/rollout-{index}"}),),
            }
        )
        for index in range(4)
    )
    view = View(summary("running", 0), None, {}, [], [group.model_copy(update={"rollouts": others})])
    told = [line for line in news(view, Seen()) if "AgentFailed: HTTP 500" in line]
    assert told == ["  r/step-0/group-0/rollout-0 attempt 0 and 3 others failed: AgentFailed: HTTP 500"]
