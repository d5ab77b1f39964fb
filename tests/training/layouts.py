"""Orders engines of several ranks in new processes, and reads what they did."""

import json
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from configs.grpo import GrpoConfig, LossConfig
from configs.training import TrainingConfig
from tests.training.run_steps import Action, Job, Order
from tests.training.samples import weights_of

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300.0


@cache
def _server() -> "subprocess.Popen[str]":
    """The process that forks ranks; it ends with this one, whose end of the pipe it reads."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "run_steps.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def prepare() -> None:
    """Begin to import what ranks need, so that the first order waits less."""
    _server()


def carry_out(order: Order) -> None:
    """Have new ranks do the jobs of an order; the log of a rank that failed is the failure of the test."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(order.model_dump_json() + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], DEADLINE_S)
    answer = server.stdout.readline().strip() if ready else f"nothing after {DEADLINE_S} s"
    if answer != "ok":
        logs = [order.log.with_suffix(f".{rank}.log") for rank in range(order.ranks)]
        texts = [f"{log.name}:\n{log.read_text()[-6000:]}" for log in logs if log.is_file()]
        raise AssertionError("\n".join([f"The ranks of {order.log.name}: {answer}", *texts]))


def job(output: Path, model_dir: Path, layout: dict[str, Any], actions: list[Action], grpo: dict[str, Any]) -> Job:
    """A job with the settings of the layout tests."""
    output.mkdir()
    settings = {"lr": 1e-3, "train_micro_batch_size": 2, "threads": 1, "weight_decay": 0.01, "lr_warmup_steps": 2}
    return Job(
        training=TrainingConfig(**(settings | layout)),
        grpo=GrpoConfig(**({"seed": 7, "loss_fn": LossConfig(reference_policy_kl_penalty=0.1)} | grpo)),
        model_dir=model_dir,
        output=output,
        actions=actions,
    )


def results(done: Job) -> list[list[Any]]:
    """The results of the actions of each rank."""
    return [
        json.loads((done.output / f"rank-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(done.training.world_size)
    ]


def trained(done: Job) -> list[list[dict[str, float]]]:
    """The metrics of the steps of each rank, without the times."""
    steps = [i for i, action in enumerate(done.actions) if action.do == "train" and not action.fails]
    return [
        [{key: value for key, value in rank[i].items() if not key.startswith("timing/")} for i in steps]
        for rank in results(done)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an exported folder."""
    return weights_of(folder)
