"""Markdown for the Temporal UI, and the reasons that people read."""

import re
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from configs.failure import FailureConfig
from tests.workflows.test_failures import FAILURE
from workflows.details import group_details, parked_group, parked_step, run_details, shortfall, step_details
from workflows.messages import BudgetState, GroupParked, GroupResult, RolloutResult, StepResult, WeightsRef

UNTIL = datetime(2026, 12, 1, 5, 30, tzinfo=UTC)


def rollout(index: int, state: str, attempt: int | None = 0, reason: str | None = None) -> RolloutResult:
    """A settled rollout."""
    return RolloutResult.model_validate(
        {
            "rollout_id": f"r/step-0/group-0/rollout-{index}",
            "index": index,
            "state": state,
            "attempt": attempt,
            "reward": 0.5 if state == "valid" else None,
            "model_calls": 4,
            "segments": 3,
            "policy_version": 7 if state == "valid" else None,
            "reason": reason,
            "attempts": 0 if attempt is None else attempt + 1,
            "generated_calls": 5,
            "replayed_calls": 3,
        }
    )


def cells(row: str) -> list[str]:
    """A row's cells, read as GitHub-flavoured Markdown does: a backslash escapes the character after it."""
    plain = re.sub(r"\\.", "x", row)
    return plain.strip().strip("|").split("|")


def plain(markdown: str) -> list[str]:
    """Lines without the space that the Temporal UI needs between columns."""
    return markdown.replace("\N{EM SPACE}", "").splitlines()


def test_a_group_is_one_row_for_each_rollout_settled_or_not() -> None:
    table = group_details("open", 4, {0: rollout(0, "valid"), 1: rollout(1, "lost", 4, "AgentFailed")}, {2: FAILURE})
    assert plain(table) == [
        "**open**",
        "",
        "| rollout | state | attempts | class | turns | replayed / generated | reward | policy |",
        "|" + " --- |" * 8,
        "| 0 | valid | 1 |  | 4 | 3 / 5 | 0.500 | 7 |",
        "| 1 | lost | 5 |  | 4 | 3 / 5 |  |  |",
        "| 2 | open | 4 | IntegrityError |  |  |  |  |",
        "| 3 | open |  |  |  |  |  |  |",
        "",
        "- rollout 1: AgentFailed",
        "- rollout 2: attempt 3: IntegrityError (environment): tokens contradict themselves",
    ]


def test_a_rollout_that_failed_before_it_was_valid_keeps_the_class() -> None:
    table = plain(group_details("sealed", 1, {0: rollout(0, "valid", 1)}, {0: FAILURE}))
    assert table[4] == "| 0 | valid | 2 | IntegrityError | 4 | 3 / 5 | 0.500 | 7 |"


def test_a_parked_group_says_how_to_go_on_and_until_when() -> None:
    states = {0: rollout(0, "valid"), 1: rollout(1, "lost"), 2: rollout(2, "masked")}
    assert parked_group("r/step-0/group-1", states, UNTIL).splitlines() == [
        "Waits for an operator until 2026-12-01 05:30:00 UTC; then it is dropped. To go on:",
        "",
        "- `onbelay group retry r/step-0/group-1 --reason WHY`: run the lost rollouts again; `--fresh` replays nothing",
        "- `onbelay group mask r/step-0/group-1 --rollout I --reason WHY`: let one keep its place without a vote",
        "- `onbelay group mask r/step-0/group-1 --all --reason WHY`: train what is valid",
        "- `onbelay group drop r/step-0/group-1 --reason WHY`: give the group up",
        '- or send the update `retry` or `mask` or `drop` with `{"actor": "YOU", "reason": "WHY"}`',
    ]


def test_a_parked_group_names_only_what_is_possible() -> None:
    text = parked_group("g", {0: rollout(0, "masked", reason="truncated")}, UNTIL)
    assert "retry" not in text
    assert "mask" not in text
    assert "`onbelay group drop g --reason WHY`" in text


def test_a_rollout_that_never_began_has_no_attempt_to_show() -> None:
    failure = FAILURE.model_copy(update={"attempt": None})
    table = group_details("open", 2, {0: rollout(0, "lost", None, "no worker")}, {1: failure})
    assert "None" not in table


@given(st.text(st.sampled_from("ab \\|\n\r\t`*…"), max_size=400))
def test_no_reason_breaks_the_table(reason: str) -> None:
    failure = FAILURE.model_copy(update={"cause": reason})
    group = group_details("dropped", 2, {0: rollout(0, "masked", reason=reason)}, {1: failure}, reason)
    ended = GroupResult(
        group_id="g", slot=0, prompt_id="p", state="dropped", valid=0, masked=1, lost=1, bucket="data", reason=reason
    )
    step = step_details("rollouts", [ended], 1)
    for table, columns, rows in ((group, 8, 4), (step, 7, 3)):
        lines = table.split("\n\n")[1].split("\n")
        assert len(lines) == rows
        assert {len(cells(line)) for line in lines} == {columns}


def test_a_long_reason_is_cut() -> None:
    assert max(len(line) for line in group_details("dropped", 1, {}, {}, "x" * 10_000).splitlines()) < 200


def test_a_shortfall_names_the_prompt_the_attempts_and_the_reasons() -> None:
    results = {
        0: rollout(0, "valid"),
        1: rollout(1, "lost", 4, "AgentFailed (agent): HTTP 500"),
        2: rollout(2, "masked", 0, "truncated"),
        3: rollout(3, "lost", None),
    }
    assert shortfall("prompt-a", 2, 4, results) == (
        "prompt prompt-a: 1 of 4 rollouts are valid, 2 are needed (rollout-1 lost after 5 attempts: "
        "AgentFailed (agent): HTTP 500; rollout-2 masked after 1 attempt: truncated; rollout-3 lost after 0 attempts)"
    )


@given(st.integers(1, 512))
def test_a_shortfall_is_short_however_large_the_group(size: int) -> None:
    results = {index: rollout(index, "lost", 4, "x" * 2000) for index in range(size)}
    assert len(shortfall("p", 2, size, results)) < 2500


def test_where_no_rollout_may_be_lost_the_shortfall_says_so() -> None:
    results = {0: rollout(0, "valid"), 1: rollout(1, "valid"), 2: rollout(2, "lost", 4, "AgentFailed")}
    assert shortfall("p", 2, 3, results).startswith("prompt p: 2 of 3 rollouts are valid, none may be lost (rollout-2")


def group(slot: int, state: str = "sealed") -> GroupResult:
    """How a group ended."""
    lost = state == "dropped"
    return GroupResult.model_validate(
        {
            "group_id": f"r/step-2/group-{slot}",
            "slot": slot,
            "prompt_id": f"prompt-{slot}",
            "state": state,
            "valid": 0 if lost else 2,
            "masked": 1,
            "lost": 2 if lost else 0,
            "mean_reward": None if lost else 0.5,
            "failure_classes": ("AgentFailed", "IntegrityError") if lost else (),
            "reason": "no rollout is valid" if lost else None,
        }
    )


def test_a_step_lists_its_groups_by_slot_and_says_why_some_were_dropped() -> None:
    text = step_details("rollouts", [group(3), group(0, "dropped")], 3, None, [(1, "r/step-2/group-1", "prompt-1")])
    lines = plain(text)
    assert lines[0] == "**rollouts**, 2 of 3 groups ended"
    assert lines[4:] == [
        "| 0 | `r/step-2/group-0` | dropped | prompt-0 | AgentFailed, IntegrityError | 0 / 1 / 2 |  |",
        "| 1 | `r/step-2/group-1` | open | prompt-1 |  |  |  |",
        "| 3 | `r/step-2/group-3` | sealed | prompt-3 |  | 2 / 1 / 0 | 0.500 |",
        "",
        "- slot 0: no rollout is valid",
    ]


def test_a_step_names_the_groups_that_wait_for_an_operator() -> None:
    parked = GroupParked(group_id="r/step-2/group-1", reason="0 of 2 are valid", failure_classes=("RolloutTimeout",))
    running = [(1, "r/step-2/group-1", "b"), (2, "r/step-2/group-2", "c")]
    text = step_details("rollouts", [], 2, open_groups=running, parked_groups=[parked]).replace("\N{EM SPACE}", "")
    assert "| 1 | `r/step-2/group-1` | parked | b | RolloutTimeout |  |  |" in text
    assert "| 2 | `r/step-2/group-2` | open | c |  |  |  |" in text
    assert text.endswith("- slot 1: 0 of 2 are valid")


def test_a_parked_step_names_what_it_lost_its_floor_and_the_commands() -> None:
    parked = parked_step("r/step-2", [group(0, "dropped")], 3, 4, UNTIL)
    assert step_details("parked", [group(0, "dropped")], 4, parked).endswith(parked)
    assert parked.splitlines() == [
        "r/step-2 lost 1 group and keeps 3, below its floor of 4:",
        "",
        "- `r/step-2/group-0` (prompt-0): no rollout is valid",
        "",
        "Waits for an operator until 2026-12-01 05:30:00 UTC; then the run ends. To go on:",
        "",
        "- `onbelay group retry r/step-2/group-0 --reason WHY`",
        "- `onbelay run set-floor r FRACTION --reason WHY`: train with fewer groups",
        '- or send the update `retry_group` with `{"group_id": "ID", "actor": "YOU", "reason": "WHY"}`',
    ]


def test_a_run_lists_its_steps_newest_first_and_what_it_may_lose() -> None:
    steps = [
        StepResult(
            step=step,
            state="applied",
            weights=WeightsRef(version=step + 1, path="w", digest="d"),
            trained=2,
            dropped=0,
            mean_reward=0.25,
        )
        for step in (0, 1)
    ]
    text = run_details(
        "running",
        steps,
        2,
        5,
        failure=FailureConfig(max_skipped_prompts=3, max_consecutive_dropped_prompts=2),
        prompts=10,
        budgets=BudgetState(consecutive_drops=1, skipped_prompts=2),
        in_flight=(2, 3),
        waits_for="an operator: step 2 is parked",
    )
    lines = plain(text)
    assert lines[:7] == [
        "**running**, step 2 of 5",
        "",
        "- in flight: step 2, step 3",
        "- dropped in a row: 1 of 2",
        "- skipped: 2 of 3",
        "- floor: 9 of 10 groups",
        "- waits for: an operator: step 2 is parked",
    ]
    assert lines[10:] == ["| 1 | 0.250 | 2 | 0 | policy-2 |", "| 0 | 0.250 | 2 | 0 | policy-1 |"]


def test_a_drained_step_has_no_weights() -> None:
    drained = StepResult(step=4, state="drained")
    assert "| 4 | 0.000 | 0 | 0 | drained |" in plain(
        run_details("stopped", [drained], 4, 9, failure=FailureConfig(), prompts=4)
    )
