"""An operator's decisions about a run, from the command line, against a real workflow and a real ledger."""

import pytest

from tests.cli.operating import WHY, Operated, until
from workers.cli.exits import CommandError
from workers.cli.levers import Request, update
from workers.cli.session import Session
from workers.cli.starting import start_run
from workflows.requests import PauseRun

pytestmark = pytest.mark.integration


async def test_a_run_is_paused_once_and_goes_on(run: Operated) -> None:
    assert "waits before step 0" in await run.ok("run", "pause", run.id, *WHY, "--dry-run")
    assert (await run.json("run", "pause", run.id, *WHY))["changed"]
    assert not (await run.json("run", "pause", run.id, *WHY))["changed"]
    assert (await run.json("run", "resume", run.id, *WHY))["changed"]
    assert not (await run.json("run", "resume", run.id, *WHY))["changed"]
    assert await run.audit() == [
        ("pause", "done", "ada"),
        ("pause", "unchanged", "ada"),
        ("resume", "done", "ada"),
        ("resume", "unchanged", "ada"),
    ]


async def test_budgets_and_floor_are_changed_live_and_a_resumed_run_has_them(run: Operated) -> None:
    await run.ok("run", "set-budget", run.id, "--max-skipped-prompts", "7", *WHY)
    await run.ok("run", "set-floor", run.id, "0.25", *WHY)

    async def written() -> bool | None:
        failure = (await run.session.ledger.runs.get(run.id)).recipe["failure"]
        assert isinstance(failure, dict)
        return True if (failure["max_skipped_prompts"], failure["min_step_batch_fraction"]) == (7, 0.25) else None

    assert await until(written)
    told = await run.json("run", "explain", run.id)
    assert {budget["key"]: budget["limit"] for budget in told["budgets"]}["max_skipped_prompts"] == 7
    assert told["floor"] == 1


async def test_a_floor_above_1_and_a_budget_below_what_is_used_are_refused_and_audited(run: Operated) -> None:
    assert "1.5" in await run.refused("run", "set-floor", run.id, "1.5", *WHY)
    assert "below what is used" in await run.refused("run", "set-budget", run.id, "--max-skipped-prompts", "-1", *WHY)
    assert [outcome for _, outcome, _ in await run.audit()] == ["refused", "refused"]


async def test_a_run_stopped_now_is_stopped_and_stopping_it_again_changes_nothing(run: Operated) -> None:
    await run.ok("run", "stop", run.id, "--now", *WHY, "--dry-run")
    await run.ok("run", "stop", run.id, "--now", *WHY)
    await run.closed()
    assert (await run.session.ledger.runs.get(run.id)).state == "stopped"

    assert not (await run.json("run", "stop", run.id, *WHY))["changed"]
    assert "is stopped" in await run.refused("run", "pause", run.id, *WHY)
    said = await run.refused("run", "set-budget", run.id, "--max-skipped-prompts", "7", *WHY)
    assert f"onbelay run resume {run.id} failure.max_skipped_prompts=7" in said


async def test_a_run_that_temporal_lost_says_how_to_go_on(run: Operated) -> None:
    await run.session.client.get_workflow_handle(run.id).terminate()

    assert f"onbelay run resume {run.id}" in await run.refused("run", "pause", run.id, *WHY)
    told = await run.json("run", "explain", run.id)
    assert (told["state"], told["temporal"]) == ("running", "closed")
    assert told["advice"] == [f"onbelay run resume {run.id} --reason TEXT"]
    assert "Temporal" in await run.ok("run", "explain", run.id)


async def test_an_unknown_run_is_refused(run: Operated) -> None:
    for command in (["pause"], ["stop"], ["resume"], ["explain"], ["audit"], ["set-floor"]):
        more = ["0.5"] if command == ["set-floor"] else []
        why = [] if command[0] in ("explain", "audit") else WHY
        assert "no run 'nobody'" in await run.refused("run", *command, "nobody", *more, *why)


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_request_that_no_worker_answers_ends_in_time_and_says_so(
    session: Session, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    monkeypatch.setattr("workers.cli.levers.ANSWER_TIMEOUT_S", 0.5)
    run_id = await start_run(session, "demo")
    asked = Request(run_id, "pause", "ada", "maintenance", {}, dry_run)
    with pytest.raises(CommandError, match=r"No worker answered .* within 0\.5 s") as error:
        await update(session, asked, run_id, "pause", PauseRun(actor="ada", reason="maintenance"))
    assert ("onbelay run audit" in str(error.value)) is not dry_run
    await session.client.get_workflow_handle(run_id).terminate()


async def test_the_actor_is_the_environments_or_the_users(run: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBELAY_ACTOR", "bot-7")
    await run.ok("run", "pause", run.id, "--reason", "maintenance")
    monkeypatch.delenv("ONBELAY_ACTOR")
    await run.ok("run", "resume", run.id, "--reason", "done")

    first, second = await run.session.ledger.actions.list(run.id)
    assert first.actor == "bot-7"
    assert "@" in second.actor
