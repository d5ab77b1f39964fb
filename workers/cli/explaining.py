"""Why a run is where it is: read from the ledger, from Temporal and from the vLLM endpoints, and put into words.

Reading changes nothing. What does not answer is said, and is no error.
"""

import asyncio
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict
from temporalio.service import RPCError

from activities.generation.vllm import VllmServer, servers_of
from configs.failure import floor_of
from configs.recipe import Recipe
from storage.ledger import Ledger
from storage.records import GroupRecord, RolloutRecord, RunRecord
from storage.runs import LIVE
from workers.cli.resuming import first_open_step
from workers.cli.session import Session
from workers.cli.temporal_runs import Known, is_open, known
from workflows import dynamic_sampling
from workflows.search_attributes import GROUP_STATE

ENDPOINT_TIMEOUT_S = 2.0


class Told(BaseModel):
    """Base of the parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepTold(Told):
    """A step that has begun and is not over. `groups` counts its train groups by state; `set_aside` sums up those
    whose rewards are all equal."""

    step: int
    phase: str
    groups: dict[str, int]
    open_rollouts: int
    set_aside: str | None = None


class RolloutTold(Told):
    """An open rollout. `call` is the ordinal of the last model call that its attempt asked for, `since` the moment at
    which it did, else at which the attempt began."""

    rollout_id: str
    attempt: int | None
    attempts: int
    worker: str | None
    call: int | None
    since: datetime | None


class StallTold(Told):
    """An attempt without any sign of life for longer than failure.stall_timeout_s."""

    group_id: str
    rollout_id: str
    attempt: int
    worker: str
    call: int | None
    since: datetime


class ParkedTold(Told):
    """A group that waits for an operator, until `deadline`."""

    group_id: str
    prompt_id: str
    step: int
    classes: tuple[str, ...]
    reason: str | None
    deadline: datetime
    commands: tuple[str, ...]


class BudgetTold(Told):
    """A drop budget."""

    key: str
    used: int
    limit: int


class FailureTold(Told):
    """The failures of one class in the steps in flight, and the last of them."""

    failure_class: str
    boundary: str | None
    count: int
    last: datetime | None
    rollout_id: str
    cause: str | None


class EndpointTold(Told):
    """A vLLM endpoint, and the label of its weights, or why there is none."""

    url: str
    serves: str | None
    problem: str | None = None


class QuarantineTold(Told):
    """An endpoint that a refit to `version` went on without; `until` is None while it is in quarantine."""

    url: str
    version: int
    since: datetime
    until: datetime | None
    reason: str


class Explanation(Told):
    """One screen. `advice` are the commands that bring a run on that waits for somebody."""

    run_id: str
    state: str
    reason: str | None
    temporal: Known
    next_step: int
    max_steps: int
    policy_version: int
    awaited: tuple[str, ...]
    advice: tuple[str, ...]
    steps: tuple[StepTold, ...]
    rollouts: tuple[RolloutTold, ...]
    stalls: tuple[StallTold, ...]
    parked: tuple[ParkedTold, ...]
    budgets: tuple[BudgetTold, ...]
    floor: int
    prompts_per_step: int
    on_dropped_prompt: str
    failures: tuple[FailureTold, ...]
    endpoints: tuple[EndpointTold, ...]
    quarantines: tuple[QuarantineTold, ...]


async def explain_run(session: Session, run_id: str) -> Explanation:
    """Look at a run; UnknownRun when there is none."""
    ledger = session.ledger
    run = await ledger.runs.get(run_id)
    recipe = Recipe.model_validate(run.recipe)
    summary = await ledger.summaries.of(run_id)
    next_step = await first_open_step(session, run_id)
    steps: list[StepTold] = []
    groups: list[GroupRecord] = []
    for step in range(next_step, next_step + recipe.rollouts.max_lookahead_versions + 1):
        own = await ledger.groups.list(run_id, step=step, purpose="train")
        groups += own
        told = await _step(session, run_id, step, own, recipe)
        if told is not None:
            steps.append(told)
    parked = [_parked(group, recipe) for group in await ledger.groups.list(run_id, states=("parked",), purpose="train")]
    budgets = await ledger.budgets.of(run_id)
    temporal = await known(session, run_id)
    failure = recipe.failure
    live = run.state in LIVE
    endpoints = tuple(await asyncio.gather(*map(_endpoint, servers_of(session.recipe.generation))))
    return Explanation(
        run_id=run_id,
        state=run.state,
        reason=run.reason,
        temporal=temporal,
        next_step=next_step,
        max_steps=recipe.grpo.max_num_steps,
        policy_version=summary.policy_version,
        awaited=tuple(awaited(run, temporal, steps, len(parked))),
        advice=tuple(advice(run, temporal)),
        steps=tuple(steps),
        rollouts=tuple([await _rollout(ledger, rollout) for rollout in _open(groups)] if live else ()),
        stalls=tuple(
            StallTold.model_validate(stall.model_dump())
            for stall in (await ledger.stalls.of(run_id, failure.stall_timeout_s) if live else ())
        ),
        parked=tuple(parked),
        budgets=(
            BudgetTold(
                key="max_consecutive_dropped_prompts",
                used=budgets.consecutive_drops,
                limit=failure.max_consecutive_dropped_prompts,
            ),
            BudgetTold(key="max_skipped_prompts", used=budgets.skipped_prompts, limit=failure.max_skipped_prompts),
        ),
        floor=floor_of(recipe.grpo.num_prompts_per_step, failure.min_step_batch_fraction),
        prompts_per_step=recipe.grpo.num_prompts_per_step,
        on_dropped_prompt=failure.on_dropped_prompt,
        failures=tuple(failures_by_class(groups)),
        endpoints=endpoints,
        quarantines=tuple(await _quarantines(ledger, run_id, [endpoint.url for endpoint in endpoints])),
    )


def awaited(run: RunRecord, temporal: Known, steps: Sequence[StepTold], parked: int) -> list[str]:
    """What has to happen before the run goes on, most urgent first."""
    if run.state not in LIVE:
        return []
    if temporal != "open":
        return [f"an operator: the ledger has it as {run.state}, Temporal does not " + _KNOWS[temporal]]
    found: list[str] = []
    if parked:
        found.append(f"an operator: {parked} group{'s are' if parked > 1 else ' is'} parked")
    if run.state == "paused":
        found.append("an operator: the run is paused")
    if steps:
        found.append(f"step {steps[0].step}, which waits for {steps[0].phase}")
    elif run.state == "running":
        found.append("the first weights, an evaluation, or the claim of the next step's prompts")
    return found


_KNOWS = {"unknown": "know it", "closed": "run it any more", "open": ""}


def advice(run: RunRecord, temporal: Known) -> list[str]:
    """Commands that bring the run on."""
    resume = f"onbelay run resume {run.run_id} --reason TEXT"
    if run.state in LIVE and temporal != "open":
        return [resume]
    if run.state == "completed":
        return [f"onbelay run resume {run.run_id} grpo.max_num_steps=N --reason TEXT"]
    return [] if run.state == "running" else [resume]


def failures_by_class(groups: Sequence[GroupRecord]) -> list[FailureTold]:
    """Failed attempts by class, the latest class first."""
    found: dict[str, FailureTold] = {}
    attempts = [attempt for group in groups for rollout in group.rollouts for attempt in rollout.attempts]
    failed = [attempt for attempt in attempts if attempt.failure_class is not None]
    for attempt in sorted(failed, key=lambda one: one.ended_at or one.started_at):
        name = attempt.failure_class or ""
        before = found.get(name)
        found[name] = FailureTold(
            failure_class=name,
            boundary=attempt.boundary,
            count=1 + (before.count if before else 0),
            last=attempt.ended_at,
            rollout_id=attempt.rollout_id,
            cause=attempt.cause,
        )
    return sorted(found.values(), key=lambda told: (told.last is not None, told.last), reverse=True)


async def _step(
    session: Session, run_id: str, step: int, groups: Sequence[GroupRecord], recipe: Recipe
) -> StepTold | None:
    """How far a step is; None when it has not begun."""
    ledger = session.ledger
    states: dict[str, int] = {}
    for group in groups:
        states[group.state] = states.get(group.state, 0) + 1
    batch = await ledger.batches.get(run_id, step)
    if batch is None and not groups:
        return None
    open_rollouts = len(_open(groups))
    if await ledger.steps.get(run_id, step) is not None:
        phase = f"policy-{step + 1} on the endpoints"
    elif batch is not None:
        phase = f"the trainer, with a batch of {_several(len(batch.group_ids), 'group')}"
    elif await _is_parked(session, f"{run_id}/step-{step}"):
        phase = "an operator: it is parked below its floor; retry a group, or lower the floor (`onbelay run set-floor`)"
    elif open_rollouts:
        phase = f"{_several(open_rollouts, 'open rollout')} in {_several(states.get('open', 0), 'group')}"
    elif states.get("parked"):
        phase = f"an operator, for {_several(states['parked'], 'parked group')}"
    else:
        phase = "its turn to train"
    rewards = [group.reward for group in await ledger.places.set_aside(run_id, step)]
    return StepTold(
        step=step,
        phase=phase,
        groups=dict(sorted(states.items())),
        open_rollouts=open_rollouts,
        set_aside=dynamic_sampling.told(recipe.grpo.num_prompts_per_step, rewards, recipe.grpo),
    )


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


async def _is_parked(session: Session, workflow_id: str) -> bool:
    if not await is_open(session, workflow_id):
        return False
    try:
        described = await session.client.get_workflow_handle(workflow_id).describe()
    except RPCError:
        return False
    return described.typed_search_attributes.get(GROUP_STATE) == "parked"


def _open(groups: Sequence[GroupRecord]) -> list[RolloutRecord]:
    return [
        rollout for group in groups if group.state == "open" for rollout in group.rollouts if rollout.state == "open"
    ]


async def _rollout(ledger: Ledger, rollout: RolloutRecord) -> RolloutTold:
    attempt = next((one for one in rollout.attempts if one.attempt == rollout.current_attempt), None)
    leases = await ledger.calls.leases(rollout.rollout_id, attempt.attempt) if attempt is not None else []
    last = max(leases, key=lambda lease: lease.ordinal, default=None)
    return RolloutTold(
        rollout_id=rollout.rollout_id,
        attempt=rollout.current_attempt,
        attempts=len(rollout.attempts),
        worker=attempt.worker if attempt else None,
        call=last.ordinal if last else None,
        since=last.claimed_at if last else attempt.started_at if attempt else None,
    )


def _parked(group: GroupRecord, recipe: Recipe) -> ParkedTold:
    failed = [attempt for rollout in group.rollouts for attempt in rollout.attempts if attempt.failure_class]
    name = group.group_id
    return ParkedTold(
        group_id=name,
        prompt_id=group.prompt_id,
        step=group.train_step,
        classes=tuple(sorted({attempt.failure_class or "" for attempt in failed})),
        reason=group.reason,
        deadline=group.updated_at + timedelta(seconds=recipe.failure.park_timeout_s),
        commands=(f"onbelay group show {name}", *commands_of(group)),
    )


def commands_of(group: GroupRecord) -> tuple[str, ...]:
    """What an operator may decide about a parked group."""
    return (
        f"onbelay group retry {group.group_id} --reason TEXT",
        f"onbelay group mask {group.group_id} --all --reason TEXT",
        f"onbelay group drop {group.group_id} --reason TEXT",
    )


async def _quarantines(ledger: Ledger, run_id: str, urls: Collection[str]) -> list[QuarantineTold]:
    """Those that this run began and that are over, then those that are open on its endpoints, whoever began them."""
    over = [stored for stored in await ledger.quarantines.of_run(run_id) if stored.released_at is not None]
    still = [stored for stored in await ledger.quarantines.open() if stored.endpoint in urls]
    return [
        QuarantineTold(
            url=stored.endpoint,
            version=stored.version,
            since=stored.since,
            until=stored.released_at,
            reason=stored.reason,
        )
        for stored in (*over, *still)
    ]


async def _endpoint(server: VllmServer) -> EndpointTold:
    async with server:
        try:
            async with asyncio.timeout(ENDPOINT_TIMEOUT_S):
                paused = " (paused)" if await server.is_paused() else ""
                return EndpointTold(url=server.url, serves=f"{await server.weight_version()}{paused}")
        except TimeoutError:
            problem = f"no answer within {ENDPOINT_TIMEOUT_S:g} s"
        except Exception as error:  # whatever is wrong with a server is what is to be told
            problem = str(error) or type(error).__name__
        return EndpointTold(url=server.url, serves=None, problem=problem)
