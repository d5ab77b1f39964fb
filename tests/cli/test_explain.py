"""`onbelay run explain` and `group list`: what a person learns of a run that does not move."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from tests.cli.operating import WHY, Operated
from tests.storage.building import Story, start_run
from workers.cli.exits import CommandError
from workers.cli.explain import show
from workers.cli.explaining import (
    BudgetTold,
    EndpointTold,
    Explanation,
    FailureTold,
    ParkedTold,
    QuarantineTold,
    RolloutTold,
    StallTold,
    StepTold,
)
from workers.cli.group import moment_of

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
GROUP = "a-run/step-4/group-1"


def explanation(**changes: object) -> Explanation:
    told = {
        "run_id": "a-run",
        "state": "running",
        "reason": None,
        "temporal": "open",
        "next_step": 4,
        "max_steps": 100,
        "policy_version": 4,
        "awaited": ("an operator: 1 group is parked", "step 4, which waits for 2 open rollouts in 1 group"),
        "advice": (),
        "steps": (
            StepTold(step=4, phase="2 open rollouts in 1 group", groups={"open": 1, "parked": 1}, open_rollouts=2),
        ),
        "rollouts": tuple(
            RolloutTold(
                rollout_id=f"a-run/step-4/group-0/rollout-{index}",
                attempt=1,
                attempts=2,
                worker="node-1:77",
                call=12,
                since=NOW - timedelta(seconds=90 * index),
            )
            for index in range(20)
        ),
        "stalls": (
            StallTold(
                group_id="a-run/step-4/group-0",
                rollout_id="a-run/step-4/group-0/rollout-19",
                attempt=1,
                worker="node-1:77",
                call=12,
                since=NOW - timedelta(seconds=1710),
            ),
        ),
        "parked": (
            ParkedTold(
                group_id=GROUP,
                prompt_id="row-000007",
                step=4,
                classes=("AgentFailed",),
                reason="prompt row-000007: 1 of 4 rollouts are valid, 2 are needed",
                deadline=NOW + timedelta(hours=20),
                commands=(f"onbelay group retry {GROUP} --reason TEXT",),
            ),
        ),
        "budgets": (BudgetTold(key="max_skipped_prompts", used=3, limit=8),),
        "floor": 3,
        "prompts_per_step": 4,
        "on_dropped_prompt": "park",
        "failures": (
            FailureTold(
                failure_class="AgentFailed",
                boundary="agent",
                count=15,
                last=NOW - timedelta(minutes=2),
                rollout_id=f"{GROUP}/rollout-0",
                cause="HTTP 500: [Errno 28] No space left on device",
            ),
        ),
        "endpoints": (
            EndpointTold(url="http://a:8000", serves="policy-4"),
            EndpointTold(url="http://b:8000", serves=None, problem="no answer within 2 s"),
        ),
        "quarantines": (
            quarantine("http://a:8000", since=90, until=75),
            quarantine("http://b:8000", since=30, until=None),
        ),
    }
    return Explanation.model_validate(told | changes)


def quarantine(url: str, since: int, until: int | None) -> QuarantineTold:
    """Since and until so many minutes ago."""
    return QuarantineTold(
        url=url,
        version=4,
        since=NOW - timedelta(minutes=since),
        until=None if until is None else NOW - timedelta(minutes=until),
        reason="connection refused",
    )


def printed(told: Explanation) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(console, told, NOW)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_screen_says_what_is_awaited_what_is_stuck_and_what_to_type() -> None:
    text = printed(explanation())
    for line in (
        "step 4 of 100, policy-4; Temporal runs it",
        "waits for an operator: 1 group is parked",
        "stuck: a-run/step-4/group-0/rollout-19 attempt 1 on node-1:77, call 12 in flight, silent for 28 min 30 s",
        f"parked: {GROUP} (prompt row-000007), until 2026-03-02 08:00 UTC [AgentFailed]",
        f"  onbelay group retry {GROUP} --reason TEXT",
        "budget failure.max_skipped_prompts: 3 of 8 used",
        "floor: 3 of 4 groups make a step; a dropped group: park",
        "HTTP 500: [Errno 28] No space left on device",
        "vLLM http://a:8000 serves policy-4",
        "vLLM http://b:8000 does not answer: no answer within 2 s",
        "vLLM http://a:8000 was in quarantine for 15 min 0 s; it did not take policy-4: connection refused",
        "vLLM http://b:8000 is in quarantine, for 30 min 0 s so far; it did not take policy-4: connection refused",
        "and 8 more",
    ):
        assert line in text, text
    assert len(text.splitlines()) <= 40


def test_what_a_step_set_aside_is_said_in_a_line() -> None:
    aside = "set aside for equal rewards: 3 (2 all 1, 1 all 0); 5 of at most 20 groups sampled"
    step = StepTold(step=4, phase="its turn", groups={"sealed": 2, "set_aside": 3}, open_rollouts=0, set_aside=aside)
    text = printed(explanation(steps=(step,)))
    assert f"step 4: {aside}" in text
    assert "sealed 2  set_aside 3" in text


def test_the_longest_silent_rollouts_are_shown_first() -> None:
    lines = [line for line in printed(explanation()).splitlines() if "/rollout-" in line and "node-1" in line]
    assert "rollout-19" in lines[0]
    assert "STUCK" in lines[0]


def test_a_run_that_temporal_does_not_know_says_how_to_go_on() -> None:
    text = printed(explanation(temporal="unknown", advice=("onbelay run resume a-run --reason TEXT",)))
    assert "the ledger has it as running, Temporal does not know it: onbelay run resume a-run --reason TEXT" in text


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30m", NOW - timedelta(minutes=30)),
        ("2h", NOW - timedelta(hours=2)),
        ("1.5d", NOW - timedelta(hours=36)),
        ("2026-01-31T12:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00+02:00", datetime(2026, 1, 31, 10, tzinfo=UTC)),
    ],
)
def test_since_is_a_span_or_a_moment(text: str, moment: datetime) -> None:
    assert moment_of(text, NOW) == moment


@pytest.mark.parametrize("text", ["2w", "h", "-3h", "tomorrow", ""])
def test_since_that_is_neither_is_wrong_usage(text: str) -> None:
    with pytest.raises(CommandError, match="--since") as error:
        moment_of(text, NOW)
    assert error.value.code == 2


@pytest.mark.integration
async def test_a_run_with_a_parked_group_is_explained(run: Operated) -> None:
    run.broken, run.sound = {0, 1}, {1}
    await run.start_group()
    await run.group("parked")
    await run.start_group(slot=1)
    await run.group("sealed", slot=1)
    await run.ok("run", "pause", run.id, *WHY)

    told = Explanation.model_validate(await run.json("run", "explain", run.id))

    assert (told.temporal, told.next_step, told.policy_version) == ("open", 0, 0)
    assert "an operator: 1 group is parked" in told.awaited
    assert [(step.step, step.groups) for step in told.steps] == [(0, {"parked": 1, "sealed": 1})]
    (parked,) = told.parked
    assert (parked.prompt_id, parked.classes) == ("p0", ("AgentFailed",))
    assert f"onbelay group retry {parked.group_id} --reason TEXT" in parked.commands
    assert [(failure.failure_class, failure.count) for failure in told.failures] == [("AgentFailed", 2)]
    assert [(endpoint.serves, endpoint.problem is None) for endpoint in told.endpoints] == [(None, False)]
    text = await run.ok("run", "explain", run.id)
    assert parked.group_id in text
    assert "Temporal UI: http" in text


@pytest.mark.integration
async def test_quarantines_of_the_run_and_of_its_endpoints_are_told(run: Operated) -> None:
    ledger, mine = run.session.ledger, str(run.recipe.generation.endpoints[0]).rstrip("/")
    earlier = Story(ledger, (await start_run(ledger)).run_id)
    for story, url in (
        (Story(ledger, run.id), "http://127.0.0.1:1"),
        (earlier, mine),
        (earlier, "http://127.0.0.1:2"),
    ):
        await ledger.weights.publish(await story.lease(), 0, "weights/0", "digest")
        await ledger.quarantines.begin(story.run_id, url, 0, "connection refused")
    assert await ledger.quarantines.release("http://127.0.0.1:1")

    told = Explanation.model_validate(await run.json("run", "explain", run.id))

    assert [(one.url, one.until is None) for one in told.quarantines] == [("http://127.0.0.1:1", False), (mine, True)]


@pytest.mark.integration
async def test_groups_are_listed_by_state_class_step_and_time(run: Operated) -> None:
    run.broken, run.sound = {0, 1}, {1}
    for slot, state in ((0, "parked"), (1, "sealed")):
        await run.start_group(slot)
        await run.group(state, slot)

    async def listed(*filters: str) -> list[str]:
        return [group["group_id"].rpartition("-")[2] for group in await run.json("group", "list", run.id, *filters)]

    assert await listed() == ["0", "1"]
    assert await listed("--failed") == ["0"]
    assert await listed("--parked", "--state", "sealed") == ["0", "1"]
    assert await listed("--dropped") == []
    assert await listed("--class", "AgentFailed") == ["0"]
    assert await listed("--class", "Other") == []
    assert await listed("--step", "1") == []
    assert await listed("--since", "1h") == ["0", "1"]
    assert await listed("--since", "2099-01-01") == []
    plain = await run.ok("group", "list", run.id)
    assert f"{run.id}/step-0/group-0" in plain
    assert not set("┃│━") & set(plain)
