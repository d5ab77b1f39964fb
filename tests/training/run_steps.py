"""Run under torchrun by the layout tests: train some steps in each of some layouts, and write what came out."""

import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel

from activities.training.batch import TrainingBatch
from activities.training.megatron.engine import Engine
from configs.grpo import LossConfig
from configs.training import TrainingConfig


class Job(BaseModel):
    """What to train. After `resume_after` steps the run is saved, thrown away and loaded again."""

    training: TrainingConfig
    loss: LossConfig
    model_dir: Path
    batches: list[Path]
    output: Path
    resume_after: int | None = None


def run(job: Job) -> None:
    engine = Engine(job.training, job.loss, seed=7)
    engine.load_model(job.model_dir)
    metrics: list[dict[str, float]] = []
    for i, file in enumerate(job.batches):
        if i == job.resume_after:
            engine.save(job.output / "checkpoint")
            engine.load(job.output / "checkpoint", job.model_dir)
        metrics.append(engine.train(TrainingBatch.from_bytes(file.read_bytes())))
    engine.export(job.output / "weights")
    (job.output / f"metrics-{engine.rank}.json").write_text(json.dumps(metrics), encoding="utf-8")


if __name__ == "__main__":
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        run(Job.model_validate_json(line))
    sys.stderr.flush()
    os._exit(0)  # threads of libtorch may abort the interpreter's finalisation
