"""Every activity of a run has the deadlines that its recipe says, and no other."""

from datetime import timedelta

from temporalio.client import Client

from configs.failure import FailureConfig
from configs.generation import GenerationConfig
from configs.rollouts import RolloutsConfig
from configs.training import TrainingConfig
from tests.workflows.building import policy, run_input, start_run
from tests.workflows.fake_run import FakeRun

LEDGER = ("set_run_state", "claim_prompts", "plan_step", "open_group", "seal_group", "find_batch", "record_step")
TRAINER = ("train_step", "publish_weights")

Deadlines = tuple[float, float, float]  # start to close, heartbeat, schedule to close; 0 is none


async def scheduled(client: Client, workflow_id: str) -> dict[str, Deadlines]:
    """Deadlines in seconds of the activities of a workflow, by name."""
    found: dict[str, Deadlines] = {}
    async for event in client.get_workflow_handle(workflow_id).fetch_history_events():
        if event.HasField("activity_task_scheduled_event_attributes"):
            asked = event.activity_task_scheduled_event_attributes
            waits = (asked.start_to_close_timeout, asked.heartbeat_timeout, asked.schedule_to_close_timeout)
            start, heartbeat, whole = (wait.ToTimedelta() / timedelta(seconds=1) for wait in waits)
            found[asked.activity_type.name] = (start, heartbeat, whole)
    return found


async def test_deadlines_are_those_of_the_recipe(client: Client, run: FakeRun) -> None:
    chosen = policy(prompts=1, rollouts=1, grpo={"max_num_steps": 1}).model_copy(
        update={
            "failure": FailureConfig(ledger_timeout_s=11, ledger_deadline_s=1200),
            "generation": GenerationConfig(refit_timeout_s=13, heartbeat_timeout_s=14),
            "rollouts": RolloutsConfig(min_valid_rollouts_per_group=1, rollout_timeout_s=150, heartbeat_timeout_s=16),
            "training": TrainingConfig(assembly_timeout_s=170, step_timeout_s=180, heartbeat_timeout_s=19),
        }
    )
    await (await start_run(client, run_input(run, chosen))).result()
    step = f"{run.id}/step-0"
    asked = {
        name: deadlines
        for workflow_id in (run.id, step, f"{step}/group-0")
        for name, deadlines in (await scheduled(client, workflow_id)).items()
    }
    assert {name: asked.pop(name) for name in LEDGER} == dict.fromkeys(LEDGER, (11, 0, 1200))
    assert asked.pop("assemble_batch") == (170, 19, 1200)
    start_to_close, heartbeat, _ = asked.pop("run_rollout")
    assert (start_to_close > 150, heartbeat) == (True, 16)  # the agent's own deadline passes first
    assert {name: asked.pop(name)[:2] for name in TRAINER} == dict.fromkeys(TRAINER, (180, 19))
    assert asked.pop("refit")[:2] == (6 * 13, 14)
    assert asked == {}
