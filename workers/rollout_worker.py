"""The rollout worker: workflows, ledger activities and rollouts. Any number of them may run.

`python -m workers.rollout_worker --recipe FILE`
"""

from collections.abc import Callable, Sequence
from typing import Any

from temporalio.worker import Worker

from activities.generation.vllm import servers_of
from activities.group_activities import GroupActivities
from activities.ledger_activities import LedgerActivities
from activities.operator_activities import OperatorActivities
from activities.rollout_activities import RolloutActivities
from activities.rollouts.gym_agent import GymAgents
from activities.run_context import RunContexts
from storage.blobs import BlobStore
from storage.ledger import Ledger
from workers.watchdog import Watchdog
from workers.worker_process import Resources, new_worker, run_worker_process
from workflows.evaluation import Evaluation
from workflows.prompt_group import PromptGroup
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep

NAME = "rollout-worker"
WORKFLOWS = (TrainingRun, TrainingStep, PromptGroup, Evaluation)


def deciding_activities(ledger: Ledger, blobs: BlobStore, contexts: RunContexts) -> list[Callable[..., Any]]:
    """The activities of the default queue."""
    writing = LedgerActivities(ledger, blobs, contexts)
    groups, operating = GroupActivities(ledger), OperatorActivities(ledger)
    return [
        writing.claim_prompts,
        writing.plan_step,
        writing.find_batch,
        writing.assemble_batch,
        writing.record_step,
        writing.record_evaluation,
        writing.set_run_state,
        groups.open_group,
        groups.lose_rollout,
        groups.seal_group,
        groups.promote_group,
        operating.record_action,
        operating.read_budgets,
        operating.change_recipe,
    ]


async def build(resources: Resources) -> Sequence[Worker]:
    """One worker for decisions and the ledger, one for rollouts."""
    recipe = resources.recipe
    blobs = BlobStore(recipe.storage.blobs_url)
    ledger = Ledger(resources.database, blobs)
    contexts = RunContexts(ledger)
    limit = recipe.rollouts.max_concurrent_rollouts
    agents = GymAgents(
        {name: str(url) for name, url in recipe.gym.agents.items()},
        max_connections=limit,
        environments={name: str(url) for name, url in recipe.gym.environments.items()},
    )
    resources.closing.push_async_callback(agents.close)
    servers = servers_of(recipe.generation)
    for server in servers:
        resources.closing.push_async_callback(server.close)
    running = RolloutActivities(ledger, blobs, contexts, agents, servers)
    queue = recipe.temporal.task_queue
    Watchdog(ledger, queue).start(resources.closing)
    return (
        new_worker(
            resources.client,
            queue,
            workflows=WORKFLOWS,
            activities=deciding_activities(ledger, blobs, contexts),
        ),
        new_worker(
            resources.client,
            f"{queue}-rollouts",
            boundary="agent",
            grace_s=recipe.rollouts.shutdown_grace_s,
            activities=[running.run_rollout],
            max_concurrent_activities=limit,
        ),
    )


if __name__ == "__main__":
    run_worker_process(NAME, build)
