"""`onbelay group replay`: a closed group once more, as a diagnostic copy that never trains.

The copy has the original's attempts and recorded calls, so that its rollouts are replayed as far as they agree with the
agent and go live where they differ. The run is not changed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)

from configs.recipe import Recipe
from storage.ledger import Ledger
from storage.records import GroupRecord, RolloutRecord, RunRecord
from storage.runs import LIVE
from workers.cli import exits
from workers.cli.exits import CommandError
from workers.cli.levers import Request, finish, refuse, refusing, request, say
from workers.cli.options import Actor, AsJson, DryRun, GroupArgument, Reason, Where
from workers.cli.session import Session, session
from workers.cli.starting import policy_of
from workers.cli.tables import new_console, new_table, print_json, print_table
from workers.cli.temporal_runs import is_open
from workflows.messages import (
    GroupInput,
    GroupResult,
    WeightsRef,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    LeverDone,
)
from workflows.search_attributes import PROMPT_ID, RUN_ID, TRAIN_STEP

_Handle = WorkflowHandle[PromptGroup, GroupResult]


@dataclass(frozen=True)
class Compared:
    """A rollout of the original and of its copy. Calls are those of the copy's own attempts."""

    index: int
    state: str
    state_before: str
    reward: float | None
    reward_before: float | None
    replayed: int
    generated: int
    reason: str | None

    @property
    def is_same(self) -> bool:
        """Whether the copy ended like the original."""
        return (self.state, self.reward) == (self.state_before, self.reward_before)


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("replay")(replay)


def replay(
    group_id: GroupArgument,
    reason: Reason,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Wait for its end, then compare.")] = False,
    actor: Actor = None,
    recipe: Where = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a closed group again as a diagnostic copy, which is linked to the original and never trained."""

    async def command() -> None:
        asked = request(group_id, "replay", actor=actor, reason=reason, dry_run=dry_run)
        async with session(recipe) as opened:
            done, handle = await refusing(opened, asked, start_copy(opened, asked))
            if handle is None or not follow:
                say(done, dry_run, as_json=as_json)
                _say_link(opened, handle)
                return
            if not as_json:
                say(done, dry_run, as_json=False)
            _say_link(opened, handle)
            try:
                await handle.result()
            except WorkflowFailureError as error:
                raise CommandError(f"{handle.id} did not end well: {error.cause}") from error
            compared = await compare(opened.ledger, group_id, handle.id)
        if as_json:
            print_json({**done.model_dump(mode="json"), "copy": handle.id, "rollouts": list(map(asdict, compared))})
        else:
            print_table(new_console(), comparison_table(compared))
            same = sum(one.is_same for one in compared)
            typer.echo(f"{same} of {len(compared)} rollouts ended as before; `onbelay group show {handle.id}`")

    exits.run(command())


async def start_copy(opened: Session, asked: Request) -> tuple[LeverDone, _Handle | None]:
    """Copy the group and start it; a dry run only checks."""
    original = await opened.ledger.groups.get(asked.target)
    run = await opened.ledger.runs.get(original.run_id)
    await _refuse_unless_possible(opened, asked, original, run)
    recipe = Recipe.model_validate(run.recipe)
    oldest = max(0, original.step - recipe.rollouts.max_lookahead_versions)
    weights = await opened.ledger.weights.get(run.run_id, oldest)
    newest = (await opened.ledger.summaries.of(run.run_id)).policy_version
    if weights is None:
        await refuse(opened, asked, f"run {run.run_id} never published policy-{oldest}, which the group began with")
    if asked.dry_run:
        for rollout in original.rollouts:  # reads every recorded call: a blob that is gone is a refusal
            for attempt in rollout.attempts:
                await opened.ledger.transcripts.of(rollout.rollout_id, attempt.attempt)
        detail = f"{_size(original)} would be copied and run again"
        return await finish(opened, asked, "done", original.state, detail), None
    copy = await opened.ledger.copies.open(original.group_id)
    policy = policy_of(recipe)
    started = GroupInput(
        run_id=run.run_id,
        step=copy.step,
        slot=copy.slot,
        purpose="diagnostic",
        prompt_id=copy.prompt_id,
        row_index=copy.row_index,
        num_rollouts=copy.num_rollouts,
        min_valid_rollouts=recipe.rollouts.min_valid_rollouts_per_group,
        weights=WeightsRef(version=oldest, path=weights.path, digest=weights.digest),
        policy=policy,
        task_queue=run.task_queue,
        newest_policy_version=max(newest, oldest),
    )
    try:
        handle = await opened.client.start_workflow(
            PromptGroup.run,
            started,
            id=copy.group_id,
            task_queue=run.task_queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"diagnostic copy of {original.group_id}",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(RUN_ID, run.run_id),
                    SearchAttributePair(TRAIN_STEP, copy.step),
                    SearchAttributePair(PROMPT_ID, copy.prompt_id),
                ]
            ),
        )
    except BaseException:
        await opened.ledger.groups.set_state(copy.group_id, "dropped", None, "its workflow could not be started")
        raise
    detail = f"the diagnostic copy {copy.group_id} runs ({_size(original)}); it is never trained"
    return await finish(opened, asked, "done", original.state, detail), handle


async def _refuse_unless_possible(opened: Session, asked: Request, original: GroupRecord, run: RunRecord) -> None:
    if original.state in ("open", "parked"):
        detail = f"group {original.group_id} is {original.state}, and only a closed group is replayed"
        if original.state == "parked":
            detail += f"; `onbelay group retry {original.group_id} --reason TEXT` goes on with it"
        await refuse(opened, asked, detail)
    if original.copy_of is not None:
        await refuse(
            opened, asked, f"group {original.group_id} is a copy itself; replay the original, {original.copy_of}"
        )
    for other in await opened.ledger.runs.list():
        if other.task_queue == run.task_queue and other.run_id != run.run_id and other.state in LIVE:
            if not await is_open(opened, other.run_id):
                continue
            await refuse(
                opened,
                asked,
                f"run {other.run_id} is {other.state} on task queue {run.task_queue}, and its policy is on the "
                "endpoints: wait for its end, or stop it",
            )


async def compare(ledger: Ledger, original_id: str, copy_id: str) -> list[Compared]:
    """How the rollouts of a copy ended, beside those of the original."""
    original, copy = await ledger.groups.get(original_id), await ledger.groups.get(copy_id)
    before = {rollout.index: rollout for rollout in original.rollouts}
    compared: list[Compared] = []
    for rollout in copy.rollouts:
        old = before[rollout.index]
        replayed, generated = await _calls(ledger, rollout, len(old.attempts))
        compared.append(
            Compared(
                index=rollout.index,
                state=rollout.state,
                state_before=old.state,
                reward=rollout.reward,
                reward_before=old.reward,
                replayed=replayed,
                generated=generated,
                reason=rollout.reason,
            )
        )
    return compared


async def _calls(ledger: Ledger, rollout: RolloutRecord, copied_attempts: int) -> tuple[int, int]:
    """Replayed and generated calls of the attempts that the copy made itself."""
    outcomes: list[str] = []
    for attempt in rollout.attempts[copied_attempts:]:
        transcript = await ledger.transcripts.of(rollout.rollout_id, attempt.attempt)
        outcomes += [turn.outcome for turn in transcript.turns]
    return outcomes.count("replayed"), outcomes.count("generated") + outcomes.count("reported")


def comparison_table(compared: Sequence[Compared]) -> Table:
    """One row a rollout."""
    table = new_table("rollout", "state", "before", "reward", "before", "replayed", "generated", "reason")
    for one in compared:
        table.add_row(
            str(one.index),
            one.state,
            one.state_before,
            _reward(one.reward),
            _reward(one.reward_before),
            str(one.replayed),
            str(one.generated),
            one.reason or "",
        )
    return table


def _reward(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _size(group: GroupRecord) -> str:
    attempts = sum(len(rollout.attempts) for rollout in group.rollouts)
    return f"{len(group.rollouts)} rollouts with {attempts} attempts"


def _say_link(opened: Session, handle: WorkflowHandle[Any, Any] | None) -> None:
    link = opened.ui_link(handle.id) if handle is not None else None
    if link:
        typer.echo(f"Temporal UI: {link}", err=True)
