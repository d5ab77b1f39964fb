"""`onbelay run explain`: why a run is where it is, on one screen."""

from collections.abc import Iterator
from datetime import UTC, datetime

import typer
from rich.console import Console
from rich.table import Table

from workers.cli import exits
from workers.cli.explaining import Explanation, QuarantineTold, explain_run
from workers.cli.options import AsJson, RunArgument, Where
from workers.cli.session import session
from workers.cli.tables import new_console, new_table, print_table

SHOWN_ROLLOUTS = 12
SHOWN_QUARANTINES = 5
_MOST_CHARS = 200


def register(run: typer.Typer) -> None:
    """Add the command."""
    run.command("explain")(explain)


def explain(run: RunArgument, recipe: Where = None, as_json: AsJson = False) -> None:
    """Say what a run waits for: steps, rollouts, parked groups, budgets, failures, endpoints."""

    async def command() -> None:
        async with session(recipe) as opened:
            explanation = await explain_run(opened, run)
            link = opened.ui_link(run)
        if as_json:
            typer.echo(explanation.model_dump_json(indent=2))
            return
        show(new_console(), explanation, datetime.now(UTC))
        if link:
            typer.echo(f"Temporal UI: {link}")

    exits.run(command())


def show(console: Console, told: Explanation, now: datetime) -> None:
    """Print the screen."""
    for line in _head(told):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if told.steps:
        table = new_table("step", "groups", "open rollouts", "waits for")
        for step in told.steps:
            counts = "  ".join(f"{state} {count}" for state, count in step.groups.items())
            table.add_row(str(step.step), counts, str(step.open_rollouts), step.phase)
        print_table(console, table)
    if told.rollouts:
        print_table(console, _rollouts(told, now))
    for line in _rest(told, now):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _head(told: Explanation) -> Iterator[str]:
    why = f": {told.reason}" if told.reason else ""
    yield f"{told.run_id} {told.state}{why}"
    known = {"open": "Temporal runs it", "closed": "its workflow has ended", "unknown": "Temporal does not know it"}
    yield (f"step {told.next_step} of {told.max_steps}, policy-{told.policy_version}; {known[told.temporal]}")
    if told.temporal != "open" and told.state in ("running", "paused"):
        yield f"the ledger has it as {told.state}, {known[told.temporal]}: {told.advice[0]}"
    elif told.advice:
        yield f"to go on: {told.advice[0]}"
    for number, what in enumerate(told.awaited):
        yield f"{'waits for' if number == 0 else '      and'} {what}"


def _rollouts(told: Explanation, now: datetime) -> Table:
    stuck = {(stall.rollout_id, stall.attempt) for stall in told.stalls}
    table = new_table("open rollout", "attempt", "last call", "for", "worker", "")
    longest = sorted(told.rollouts, key=lambda one: (one.since is None, one.since))
    for one in longest[:SHOWN_ROLLOUTS]:
        table.add_row(
            one.rollout_id,
            "not begun" if one.attempt is None else f"{one.attempt} of {one.attempts}",
            "" if one.call is None else f"#{one.call}",
            "" if one.since is None else _ago(one.since, now),
            one.worker or "",
            "STUCK" if (one.rollout_id, one.attempt) in stuck else "",
        )
    if len(longest) > SHOWN_ROLLOUTS:
        table.add_row(f"and {len(longest) - SHOWN_ROLLOUTS} more", "", "", "", "", "")
    return table


def _rest(told: Explanation, now: datetime) -> Iterator[str]:
    for step in told.steps:
        if step.set_aside:
            yield f"step {step.step}: {step.set_aside}"
    for stall in told.stalls:
        call = "no call in flight" if stall.call is None else f"call {stall.call} in flight"
        yield (
            f"stuck: {stall.rollout_id} attempt {stall.attempt} on {stall.worker}, {call}, "
            f"silent for {_ago(stall.since, now)}"
        )
    for group in told.parked:
        classes = f" [{', '.join(group.classes)}]" if group.classes else ""
        yield f"parked: {group.group_id} (prompt {group.prompt_id}), until {group.deadline:%Y-%m-%d %H:%M} UTC{classes}"
        yield f"  {_short(group.reason)}"
        for command in group.commands:
            yield f"  {command}"
    for budget in told.budgets:
        yield f"budget failure.{budget.key}: {budget.used} of {budget.limit} used"
    yield (
        f"floor: {told.floor} of {told.prompts_per_step} groups make a step; a dropped group: {told.on_dropped_prompt}"
    )
    for failure in told.failures:
        when = f", last {_ago(failure.last, now)} ago" if failure.last else ""
        yield (
            f"failed: {failure.count} x {failure.failure_class} ({failure.boundary}){when} at {failure.rollout_id}: "
            f"{_short(failure.cause)}"
        )
    for endpoint in told.endpoints:
        yield (
            f"vLLM {endpoint.url} serves {endpoint.serves}"
            if endpoint.serves
            else (f"vLLM {endpoint.url} does not answer: {_short(endpoint.problem)}")
        )
    for quarantine in told.quarantines[-SHOWN_QUARANTINES:]:
        yield (
            f"vLLM {quarantine.url} {_spell(quarantine, now)}; it did not take policy-{quarantine.version}: "
            f"{_short(quarantine.reason)}"
        )


def _spell(quarantine: QuarantineTold, now: datetime) -> str:
    if quarantine.until is not None:
        return f"was in quarantine for {_ago(quarantine.since, quarantine.until)}"
    return f"is in quarantine, for {_ago(quarantine.since, now)} so far"


def _short(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}…"


def _ago(then: datetime, now: datetime) -> str:
    """A span of time in one or two units."""
    seconds = max(0, int((now - then).total_seconds()))
    for unit, size, finer, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {finer}"
    return f"{seconds} s"
