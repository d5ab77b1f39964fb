"""Parallel layouts under torchrun train what one rank trains, across a save and a resume."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.grpo import LossConfig
from configs.training import TrainingConfig
from tests.training.run_steps import Job, run
from tests.training.samples import greatest_difference, make_batch, weights_of, write_model

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "run_steps.py"
# Names and settings of the jobs that share two processes.
LAYOUTS: list[dict[str, dict[str, Any]]] = [
    {
        "data": {"data_parallel_size": 2},
        "data-distributed-optimizer": {"data_parallel_size": 2, "use_distributed_optimizer": True},
    },
    {"tensor": {"tensor_model_parallel_size": 2}},
    {"pipeline": {"pipeline_model_parallel_size": 2}},
]
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def job_for(folder: Path, name: str, layout: dict[str, Any], *, resume_after: int | None) -> Job:
    output = folder / name
    output.mkdir()
    return Job(
        training=TrainingConfig(lr=1e-3, train_micro_batch_size=2, threads=1, **layout),
        loss=LossConfig(reference_policy_kl_penalty=0.1),
        model_dir=folder / "model",
        batches=sorted(folder.glob("batch-*")),
        output=output,
        resume_after=resume_after,
    )


def result_of(output: Path, rank: int) -> Result:
    return json.loads((output / f"metrics-{rank}.json").read_text()), weights_of(output / "weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with per-head norms, and three batches."""
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", "qwen3-tied")
    for step in range(3):
        (folder / f"batch-{step}").write_bytes(make_batch(step).to_bytes())
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Result:
    job = job_for(folder, "one-rank", {}, resume_after=None)
    run(job)
    return result_of(job.output, 0)


def train_on_two_ranks(jobs: list[Job], file: Path) -> None:
    file.write_text("\n".join(job.model_dump_json() for job in jobs), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(SCRIPT), str(file)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]


@pytest.mark.integration
@pytest.mark.parametrize("layouts", LAYOUTS, ids=["data", "tensor", "pipeline"])
def test_two_ranks_train_what_one_rank_trains(
    folder: Path, one_rank: Result, layouts: dict[str, dict[str, Any]]
) -> None:
    jobs = [job_for(folder, name, layout, resume_after=2) for name, layout in layouts.items()]

    train_on_two_ranks(jobs, folder / "-".join(["jobs", *layouts]))

    expected, expected_weights = one_rank
    for job in jobs:
        for rank in range(2):
            metrics, weights = result_of(job.output, rank)
            assert metrics == [pytest.approx(values, rel=1e-4, abs=1e-6) for values in expected]
            assert [step["loss"] for step in metrics] == pytest.approx([step["loss"] for step in expected], abs=1e-6)
            assert greatest_difference(weights, expected_weights) < 2e-5
