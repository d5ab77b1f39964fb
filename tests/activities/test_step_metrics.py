"""A recorded step has every metric of the catalogue, and what the ledger gives counts over the whole run."""

import dataclasses
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from temporalio.testing import ActivityEnvironment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from activities.metrics.catalogue import ALWAYS, CATALOGUE, TRAINER, WORKFLOW, is_known
from activities.metrics.tensorboard import StepMetricsWriter
from activities.metrics.wandb_files import run_files, steps_in
from configs.grpo import GrpoConfig
from storage import step_statistics
from tests.activities.world import World, call
from tests.rollouts.agent_server import answering
from tests.rollouts.building import real_answer
from workflows.messages import AssembleBatch, SetRunState
from workflows.training_messages import RecordStep

pytestmark = pytest.mark.integration

Request = TypeVar("Request")
Result = TypeVar("Result")

MEASURED = {metric.name: 1.0 for metric in (*TRAINER, *WORKFLOW)}
"""What a step comes with from the trainer and the workflow."""


async def trained(world: World, step: int, *group_ids: str) -> None:
    """Assemble and apply a step."""
    request = AssembleBatch(run_id=world.run_id, step=step, group_ids=group_ids)
    batch = await call(world.writing.assemble_batch, request)
    await world.ledger.steps.apply(await world.lease(), step, batch.digest, {}, 0)


async def recorded(world: World, step: int, **measured: float) -> dict[str, float]:
    """Record a step; what the ledger has of it then."""
    metrics = MEASURED | {name.replace("__", "/"): value for name, value in measured.items()}
    await call(world.writing.record_step, RecordStep(run_id=world.run_id, step=step, metrics=metrics))
    return (await world.ledger.steps.metrics(world.run_id))[step]


def part(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """The metrics below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


async def test_every_step_has_every_metric_of_the_catalogue_and_no_other(world: World) -> None:
    await trained(world, 0, await world.run_group(1.0, 0.0))
    metrics = await recorded(world, 0)
    assert ALWAYS - metrics.keys() == set()
    assert [name for name in metrics if not is_known(name)] == []
    assert metrics.keys() - ALWAYS == {
        f"safe_agent/{key}/{part}"
        for key in ("reward", "noncontiguous_truncated")
        for part in ("mean", "max", "min", "median", "stddev")
    }
    tensorboard = EventAccumulator(str(StepMetricsWriter(world.folder / "training").folder(world.run_id)))
    tensorboard.Reload()
    assert set(tensorboard.Tags()["scalars"]) == metrics.keys()


async def test_step_of_which_nothing_is_in_the_ledger_has_zeros(world: World) -> None:
    metrics = await recorded(world, 0)
    of_ledger = {metric.name for metric in CATALOGUE if metric.source == "ledger" and not metric.is_pattern}
    padding = {"context_compaction/padding_rows", "context_compaction/physical_rows"}
    not_zero = {name for name in of_ledger if metrics[name] != 0.0}
    assert not_zero == {"train/dynamic_sampling_num_gen_batches", *padding}


async def test_consumed_samples_are_the_groups_trained_so_far(world: World) -> None:
    consumed: list[tuple[float, float]] = []
    for step, count in enumerate((2, 1, 2)):
        groups = [await world.run_group(1.0, None, slot=slot, step=step) for slot in range(count)]
        await trained(world, step, *groups)
        metrics = await recorded(world, step)
        consumed.append((metrics["train/consumed_samples"], metrics["train/consumed_rollouts"]))
    assert consumed == [(2, 4), (3, 6), (5, 10)]
    assert (await recorded(world, 1))["train/consumed_samples"] == 3
    assert (await recorded(world, 2))["rollout/train_steps"] == 3


async def test_rewards_turns_and_tokens_are_those_of_the_rollouts_that_train(world: World) -> None:
    groups = (await world.run_group(1.0, 0.0, slot=0), await world.run_group(0.5, None, 0.5, slot=1))
    await trained(world, 0, *groups)
    metrics = await recorded(world, 0, timing__train__policy_training=2.0)
    assert part(metrics, "total_reward/") == {
        "mean": 0.5,
        "max": 1.0,
        "min": 0.0,
        "median": 0.5,
        "stddev": pytest.approx(0.408248, abs=1e-6),
    }
    assert part(metrics, "safe_agent/reward/") == part(metrics, "total_reward/")
    spread = {"max": 2.0, "min": 2.0, "mean": 2.0, "median": 2.0, "stddev": 0.0}
    assert part(metrics, "turns_per_sample/") == spread | {"p95": 2.0, "p99": 2.0}
    assert part(metrics, "max_gen_tokens_per_turn/") == spread
    assert metrics["gen_tokens_per_sample/mean"] == metrics["mean_gen_tokens_per_sample"] == 3.0
    assert metrics["total_tokens_per_sample/max"] == 6.0
    assert metrics["finalize/invalid_row_rate"] == 0.2
    assert metrics["timing/train/valid_tokens_per_sec_per_gpu"] == 12 / 2.0
    assert metrics["train/segments_max"] == 1.0


async def test_rollout_in_segments_counts_once_and_its_segments_are_rows(world: World) -> None:
    group = await world.open_group(num_rollouts=2)
    for index, name in enumerate(("compaction", "simple")):
        world.agent.reply = world.model.serving(real_answer(name))
        await call(world.rollouts.run_rollout, world.rollout(group, index))
    await world.seal(group)
    await trained(world, 0, group)
    metrics = await recorded(world, 0, train__padding_rows=3.0)
    assert part(metrics, "context_compaction/") == {
        "logical_rollouts": 2,
        "physical_traces": 4,
        "padding_rows": 3,
        "physical_rows": 7,
        "eligible_action_tokens": 286,
    }
    assert metrics["train/segments_max"] == 3
    turns = metrics["turns_per_sample/mean"]
    assert metrics["finalize/calls_per_rollout"] == turns > 1
    calls = (metrics["finalize/token_in_calls"], metrics["finalize/text_root_calls"])
    assert sum(calls) == 2 * turns
    assert metrics["finalize/token_in_rate"] == calls[0] / sum(calls)
    assert metrics["gen_tokens_per_sample/mean"] * 2 == 286


async def test_retries_are_counted_by_what_they_were_for(world: World) -> None:
    group = await world.open_group(num_rollouts=2)
    world.agent.reply = answering(500, {"detail": "the agent broke"})
    for attempt in (1, 2):
        with pytest.raises(Exception, match="500"):
            await call(world.rollouts.run_rollout, world.rollout(group, 0), attempt)
    world.agent.reply = world.model.serving(real_answer("simple"))
    await call(world.rollouts.run_rollout, world.rollout(group, 0), 3)
    world.agent.reply = answering(422, {"detail": "no such task"})
    with pytest.raises(Exception, match="422"):
        await call(world.rollouts.run_rollout, world.rollout(group, 1))
    await world.lose(group, 1)
    await world.seal(group)
    await trained(world, 0, group)
    metrics = await recorded(world, 0)
    (infra,) = part(metrics, "rollout/redispatch_total/").values()
    assert metrics["rollout/redispatch_total"] == infra == 2
    assert metrics["rollout/data_retry_total"] == 0, "a failure that nothing followed is no retry"
    assert metrics["rollout/gym_row_redispatch_total"] == 2
    assert [name for name in metrics if not is_known(name)] == []


async def test_drops_are_counted_over_the_run_and_the_longest_series_ends_with_a_group_that_ended_well(
    world: World,
) -> None:
    for slot, bucket in enumerate(("infra", "infra", "data", "infra", None)):
        await world.drop_group(bucket, slot=slot)
    kept = await world.run_group(1.0, 0.0, slot=0, step=1)
    await world.drop_group("infra", slot=1, step=1)
    await world.open_group(slot=0, step=2)
    await trained(world, 1, kept)
    metrics = await recorded(world, 1)
    counted = part(metrics, "rollout/")
    assert (counted["committed_total"], counted["skipped_total"]) == (1, 6)
    assert (counted["infra_drops_total"], counted["data_failures_total"]) == (4, 1)
    assert counted["max_consecutive_infra_drops"] == 3
    assert counted["inflight"] == 1
    assert 0 <= counted["idle_s"] < 60
    assert metrics["finalize/group_dropped"] == 1


async def test_truncation_is_counted_over_all_that_answered(world: World) -> None:
    await world.use(grpo={"overlong_filtering": True})
    group = await world.open_group(num_rollouts=3)
    for index in range(2):
        world.agent.reply = world.model.serving(real_answer("simple"))
        await call(world.rollouts.run_rollout, world.rollout(group, index))
    cut = real_answer("simple")
    cut["response"]["status"] = "incomplete"
    world.agent.reply = world.model.serving(cut)
    await call(world.rollouts.run_rollout, world.rollout(group, 2))
    await world.seal(group)
    await trained(world, 0, group)
    metrics = await recorded(world, 0)
    assert metrics["truncation_rate"] == pytest.approx(1 / 3)
    assert metrics["natural_termination_rate"] == pytest.approx(2 / 3)
    assert metrics["finalize/invalid_row_rate"] == pytest.approx(1 / 3)


async def test_groups_set_aside_make_more_batches_than_one(world: World) -> None:
    prompts = GrpoConfig().num_prompts_per_step
    world.agent.reply = world.model.serving(real_answer("simple"))
    for slot in range(2):
        group = await world.open_group(slot, 1)
        await call(world.rollouts.run_rollout, world.rollout(group))
        await world.seal(group, "set_aside")
    await trained(world, 0, await world.run_group(1.0, 0.0, slot=2))
    metrics = await recorded(world, 0)
    assert metrics["train/set_aside_prompt_groups"] == 2
    assert metrics["train/dynamic_sampling_num_gen_batches"] == (prompts + 2) / prompts
    assert metrics["rollout/committed_total"] == 3


async def test_step_recorded_again_keeps_what_was_written_first_everywhere(world: World) -> None:
    await trained(world, 0, await world.run_group(1.0, 0.0))
    first = await recorded(world, 0)
    await world.drop_group("infra", step=1)
    assert await recorded(world, 0, train__loss=7.0) == first
    tensorboard = EventAccumulator(str(StepMetricsWriter(world.folder / "training").folder(world.run_id)))
    tensorboard.Reload()
    for name in ("train/loss", "rollout/skipped_total"):
        assert [event.value for event in tensorboard.Scalars(name)] == [first[name]]


async def test_recorded_steps_are_read_from_one_on_and_never_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_statistics, "RECORDED_STEPS_AT_ONCE", 2)
    for step in range(4):
        await world.ledger.steps.record_metrics(world.run_id, step, {"train/loss": float(step), "train/lr": 0.5})
    read = await world.ledger.statistics.recorded(world.run_id, 1)
    assert read == {step: {"train/loss": float(step), "train/lr": 0.5} for step in (1, 2)}
    assert await world.ledger.statistics.recorded(world.run_id, 4) == {}
    assert await world.ledger.statistics.recorded("nobody", 0) == {}


async def waiting(function: Callable[[Request], Awaitable[Result]], request: Request) -> Result:
    """Run an activity that has ten minutes."""
    environment = ActivityEnvironment()
    times: dict[str, Any] = {"start_to_close_timeout": timedelta(minutes=10), "started_time": datetime.now(UTC)}
    environment.info = dataclasses.replace(environment.info, **times)
    return await environment.run(function, request)


async def test_wandb_gets_what_is_recorded_and_at_the_end_what_it_missed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    await world.use(logger={"wandb": {"project": "climbing", "mode": "offline"}})
    await trained(world, 0, await world.run_group(1.0, 0.0))
    await waiting(world.writing.record_step, RecordStep(run_id=world.run_id, step=0, metrics=MEASURED))
    missed = {"train/loss": 0.25}
    await world.ledger.steps.record_metrics(world.run_id, 1, missed)
    await waiting(world.writing.set_run_state, SetRunState(run_id=world.run_id, state="completed"))
    ledger = await world.ledger.steps.metrics(world.run_id)
    sent = {
        step: {name: float(value) for name, value in values.items() if not name.startswith("_")}
        for file in run_files(world.folder / "training" / world.run_id, world.run_id)
        for step, values in steps_in(file).items()
    }
    assert sent.keys() == {0, 1}
    assert sent[0] == pytest.approx(ledger[0])
    assert sent[1] == missed
