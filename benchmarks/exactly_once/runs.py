"""One run of the product, undisturbed or with one kill of the trainer, and what it left behind."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from activities.generation.weights import weights_digest
from benchmarks.exactly_once.batches import store_run
from benchmarks.exactly_once.checkpoints import state_digest
from benchmarks.exactly_once.lineage import Applied, exported_chain, read_log, times_applied
from benchmarks.exactly_once.points import KILLED_STEP, STEPS, Aim, PointName, final_state, hit, struck, take_aim
from benchmarks.exactly_once.stack import Stack
from storage.database import Database
from storage.models.steps import OptimizerStep
from workers.cli.starting import policy_of
from workflows.messages import RunInput, RunResult
from workflows.training_run import TrainingRun

RUN_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class RunOutcome:
    """Of the newest version: `weights` is the digest of its files, `state` that of its optimizer and model, `chain`
    its steps.

    `rows` are the run's optimizer_steps, `applied` its optimizer steps that any process did. `problems`: what an
    undisturbed run would not have.
    """

    run_id: str
    point: str | None
    weights: str
    state: str
    batches: tuple[str, ...]
    chain: tuple[Applied, ...]
    rows: int
    applied: int
    wall_s: float
    problems: tuple[str, ...]

    @property
    def twice(self) -> int:
        """Steps that the final weights hold more than once."""
        return len(self.chain) - len({one.step for one in self.chain})

    @property
    def is_exact(self) -> bool:
        """Whether the final weights are each stored batch once, in order."""
        return self.chain == tuple(Applied(step, digest) for step, digest in enumerate(self.batches))


async def run_once(stack: Stack, number: int, point: PointName | None) -> RunOutcome:
    """Store its batches, run it to its end, read what became of it."""
    run_id = f"run-{number}"
    recipe = stack.recipe_of(run_id)
    batches = await store_run(stack.ledger, stack.blobs, stack.writing, recipe)
    if point is not None:
        _arm(stack, Aim(point, run_id, KILLED_STEP, batches[KILLED_STEP]))
    started = time.monotonic()
    given = RunInput(run_id=run_id, policy=policy_of(recipe), task_queue=recipe.temporal.task_queue)
    async with asyncio.timeout(RUN_TIMEOUT_S):
        result = await stack.client.execute_workflow(TrainingRun.run, given, id=run_id, task_queue=given.task_queue)
    wall_s = time.monotonic() - started
    events = read_log(stack.folder)
    published = await stack.ledger.weights.get(run_id, STEPS)
    state = final_state(stack.folder, run_id)
    return RunOutcome(
        run_id=run_id,
        point=point,
        weights="" if published is None else weights_digest(Path(published.path)),
        state=state_digest(state) if state.is_dir() else "",
        batches=tuple(batches),
        chain=tuple(exported_chain(events, run_id, STEPS)),
        rows=await _optimizer_steps(stack, run_id),
        applied=times_applied(events, run_id),
        wall_s=wall_s,
        problems=tuple(await _problems(stack, run_id, result, point)),
    )


def _arm(stack: Stack, aim: Aim) -> None:
    """Aim; what is to happen during the refit is done from here, for the trainer has no part in it."""
    take_aim(stack.folder, aim)
    if aim.point != "during the refit":
        return

    def kill(folder: Path) -> None:
        if aim.is_folder(folder, "weights", "policy") and hit(stack.folder, stack.trainer_pid()):
            stack.kill_trainer()

    stack.endpoint.on_load = kill


async def _optimizer_steps(stack: Stack, run_id: str) -> int:
    database = Database(stack.recipe.storage)
    try:
        async with database.transaction() as session:
            counted = select(func.count()).select_from(OptimizerStep).where(OptimizerStep.run_id == run_id)
            return await session.scalar(counted) or 0
    finally:
        await database.close()


async def _problems(stack: Stack, run_id: str, result: RunResult, point: PointName | None) -> list[str]:
    """What an undisturbed run would not have."""
    problems = [f"{one.invariant}: {one.row} ({one.detail})" for one in await stack.ledger.checks.of(run_id)]
    if (result.state, result.steps, result.policy_version) != ("completed", STEPS, STEPS):
        problems.append(
            f"the run ended as {result.state} with {result.steps} steps and version {result.policy_version}"
        )
    published = await stack.ledger.weights.get(run_id, STEPS)
    if published is None or stack.endpoint.digest != published.digest:
        problems.append(f"the endpoint serves {stack.endpoint.label} with other weights than the run published")
    if point is not None and struck(stack.folder) is None:
        problems.append(f"nobody was killed {point}")
    return problems
