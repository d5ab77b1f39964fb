"""Metrics of steps, as TensorBoard reads them."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from activities.metrics.tensorboard import StepMetricsWriter


def read(writer: StepMetricsWriter, tag: str = "train/loss") -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(writer.folder("run")))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


@pytest.fixture
def writer(tmp_path: Path) -> StepMetricsWriter:
    return StepMetricsWriter(tmp_path)


def test_each_metric_is_a_scalar_of_its_step(writer: StepMetricsWriter, tmp_path: Path) -> None:
    writer.write_step("run", 0, {"train/loss": 0.5, "train/reward": 0.25})
    writer.write_step("run", 1, {"train/loss": 0.125, "train/reward": 1})

    assert writer.folder("run") == tmp_path / "run" / "tensorboard"
    assert read(writer) == [(0, 0.5), (1, 0.125)]
    assert read(writer, "train/reward") == [(0, 0.25), (1, 1.0)]


def test_a_step_that_is_written_again_counts_once(writer: StepMetricsWriter) -> None:
    for loss in (1.0, 2.0, 2.0):
        writer.write_step("run", 0, {"train/loss": loss})

    assert read(writer) == [(0, 2.0)]


def test_a_step_that_a_dead_worker_wrote_counts_once(writer: StepMetricsWriter, tmp_path: Path) -> None:
    writer.write_step("run", 0, {"train/loss": 1.0})
    writer.write_step("run", 1, {"train/loss": 2.0})

    successor = StepMetricsWriter(tmp_path)
    successor.write_step("run", 1, {"train/loss": 4.0})
    successor.write_step("run", 2, {"train/loss": 8.0})

    assert read(writer) == [(0, 1.0), (1, 4.0), (2, 8.0)]


def test_two_workers_can_take_turns(writer: StepMetricsWriter, tmp_path: Path) -> None:
    other = StepMetricsWriter(tmp_path)
    for step in range(6):
        (writer, other)[step % 2].write_step("run", step, {"train/loss": float(step)})

    assert read(writer) == [(step, float(step)) for step in range(6)]


def test_runs_do_not_mix(writer: StepMetricsWriter) -> None:
    writer.write_step("run", 0, {"train/loss": 1.0})
    writer.write_step("other", 0, {"train/loss": 2.0})

    assert read(writer) == [(0, 1.0)]
