"""An operator's decisions about groups, from the command line, against real workflows and a real ledger."""

import pytest
from typer.testing import CliRunner

from tests.cli.operating import WHY, Operated, until
from workers.cli.main import app

pytestmark = pytest.mark.integration


async def test_a_parked_group_is_retried_and_sealed_and_the_audit_names_actor_and_reason(run: Operated) -> None:
    run.broken = {0, 1}
    await run.start_group()
    parked = await run.group("parked")

    listed = await run.json("group", "list", run.id, "--parked")
    assert [group["group_id"] for group in listed] == [parked.group_id]
    would = await run.ok("group", "retry", parked.group_id, *WHY, "--dry-run")
    assert would.startswith("dry run, nothing is changed: ")
    assert await run.audit() == []
    run.broken = set()
    done = await run.json("group", "retry", parked.group_id, *WHY)

    assert (done["changed"], done["dry_run"], done["target"]) == (True, False, parked.group_id)
    sealed = await run.group("sealed")
    assert [rollout.state for rollout in sealed.rollouts] == ["valid"] * 3
    (action,) = await run.session.ledger.actions.list(run.id)
    assert (action.verb, action.actor, action.reason) == ("retry", "ada", "the sandbox was full")
    assert "the sandbox was full" in await run.ok("run", "audit", run.id)


async def test_a_group_that_was_set_aside_is_listed_with_its_reason_and_takes_no_request(run: Operated) -> None:
    await (await run.start_group(samples_dynamically=True)).result()
    aside = await run.group("set_aside")

    (listed,) = await run.json("group", "list", run.id, "--state", "set_aside")
    assert listed["reason"] == aside.reason
    shown = await run.ok("group", "show", aside.group_id)
    assert f"set_aside\nprompt p0: all {len(aside.rollouts)} valid rollouts have reward 0.5" in shown
    for command in (["retry", aside.group_id], ["drop", aside.group_id], ["mask", aside.group_id, "--all"]):
        said = await run.refused("group", *command, *WHY)
        assert "is set_aside" in said
        assert f"onbelay group replay {aside.group_id}" in said
    told = await run.json("run", "explain", run.id)
    assert [step["groups"] for step in told["steps"]] == [{"set_aside": 1}]
    assert told["steps"][0]["set_aside"].startswith("set aside for equal rewards: 1 (1 all 0.5)")


async def test_a_group_that_is_over_refuses_and_says_how_it_stands(run: Operated) -> None:
    handle = await run.start_group()
    await handle.result()
    group_id = f"{run.id}/step-0/group-0"

    for command in (["retry", group_id], ["drop", group_id], ["mask", group_id, "--rollout", "0"]):
        said = await run.refused("group", *command, *WHY)
        assert "is sealed" in said
        assert "onbelay group replay" in said
        assert await run.refused("group", *command, *WHY, "--dry-run") == said

    assert await run.audit() == [(verb, "refused", "ada") for verb in ("retry", "drop", "mask")]


async def test_a_rollout_is_masked_once_and_a_second_time_it_is_unchanged(run: Operated) -> None:
    run.broken = {0, 1}
    await run.start_group()
    group_id = (await run.group("parked")).group_id

    assert (await run.json("group", "mask", group_id, "--rollout", "1", *WHY))["changed"]
    again = await run.json("group", "mask", group_id, "--rollout", "1", *WHY)
    assert not again["changed"]
    assert "valid" in await run.refused("group", "mask", group_id, "--rollout", "2", *WHY)
    assert "rollouts 0 to 2" in await run.refused("group", "mask", group_id, "--rollout", "9", *WHY)
    await run.ok("group", "mask", group_id, "--all", *WHY)

    sealed = await run.group("sealed")
    assert [rollout.state for rollout in sealed.rollouts] == ["masked", "masked", "valid"]
    assert not (await run.json("group", "mask", group_id, "--rollout", "1", *WHY))["changed"]


async def test_two_operators_who_drop_the_same_group_both_succeed(run: Operated) -> None:
    run.broken = {0, 1, 2}
    await run.start_group()
    group_id = (await run.group("parked")).group_id

    first = await run.json("group", "drop", group_id, *WHY)
    dropped = await run.group("dropped")
    second = await run.json("group", "drop", group_id, "--reason", "me too", "--actor", "bob")

    assert (first["changed"], second["changed"]) == (True, False)
    assert (dropped.bucket, "ada" in (dropped.reason or "")) == (None, True)
    assert await run.audit() == [("drop", "done", "ada"), ("drop", "unchanged", "bob")]


async def test_a_dropped_group_is_taken_up_again_by_its_open_step(run: Operated) -> None:
    run.broken, run.sound = {0, 1}, {0}
    await run.start_step()
    dropped = await run.group("dropped", slot=1)
    run.broken = set()

    async def known_to_step() -> bool | None:
        would = await run.onbelay("group", "retry", dropped.group_id, *WHY, "--dry-run")
        return True if would.exit_code == 0 else None

    await until(known_to_step)
    await run.ok("group", "retry", dropped.group_id, *WHY)

    await run.group("sealed", slot=1)
    (action,) = await run.session.ledger.actions.list(run.id)
    assert (action.target, action.outcome) == (dropped.group_id, "done")


async def test_a_dropped_group_of_a_step_that_is_over_is_not_retried(run: Operated) -> None:
    run.broken, run.sound = {0, 1}, {0}
    step = await run.start_step()
    dropped = await run.group("dropped", slot=1)
    await step.terminate()

    said = await run.refused("group", "retry", dropped.group_id, *WHY)
    assert "not in flight" in said
    assert "onbelay group replay" in said


async def test_a_group_whose_workflow_is_lost_says_how_to_go_on(run: Operated) -> None:
    run.broken = {0, 1}
    handle = await run.start_group()
    parked = await run.group("parked")
    await handle.terminate()

    said = await run.refused("group", "retry", parked.group_id, *WHY)
    assert "is parked" in said
    assert f"onbelay run resume {run.id}" in said


async def test_an_unknown_group_is_refused_and_audited_where_the_run_is_known(run: Operated) -> None:
    assert "no group" in await run.refused("group", "retry", f"{run.id}/step-9/group-9", *WHY)
    assert "no group" in await run.refused("group", "drop", "nobody/step-9/group-9", *WHY)
    assert await run.audit() == [("retry", "refused", "ada")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["group", "retry", "r/step-0/group-0"], "--reason"),
        (["group", "retry", "r/step-0/group-0", "--reason", "  "], "--reason must have"),
        (["group", "retry", "r/step-0/group-0", "--reason", "x" * 2001], "it has 2001"),
        (["group", "mask", "r/step-0/group-0", "--reason", "x"], "--rollout INDEX"),
        (["group", "mask", "r/step-0/group-0", "--reason", "x", "--all", "--rollout", "1"], "--rollout INDEX"),
        (["group", "list", "r", "--since", "yesterday"], "--since yesterday"),
        (["run", "stop", "r", "--reason", "x", "--now", "--after", "3"], "exclude each other"),
        (["run", "set-budget", "r", "--reason", "x"], "Say which"),
        (["run", "set-floor", "r", "nan", "--reason", "x"], "must be a number"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_missing(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, text in result.output) == (2, True), result.output
