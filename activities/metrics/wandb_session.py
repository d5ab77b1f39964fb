"""One session with W&B, in a process of its own (`python -m activities.metrics.wandb_session`), so that whatever its
client does, waits for or prints stays out of the worker, and a deadline can end it. It never outlives its worker, so
that it is over before another worker sends.

It speaks in lines of JSON. It is told about the run, and answers with the first step that W&B does not have; it is told
steps, and once its input ends it answers how many W&B has taken. Then they are on the server, or in the files of an
offline session. An error is an answer too.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from configs.logger import WandbConfig

_WATCH_PERIOD_S = 0.2

QUIET = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "quiet": True,
    "save_code": False,
    "show_info": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings: metrics are sent, and of the machine and its code no more than the versions of Python and the client."""


def main() -> None:
    """Run the session of standard input and output; what libraries print goes to standard error."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except Exception as error:  # W&B's client has errors of many libraries; all of them are an answer
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    answers.close()
    os._exit(0)  # what is left of W&B's threads has nothing more to do


def serve(asked: TextIO, answers: TextIO) -> None:
    """One session. Every step is logged at its own number, so W&B itself refuses one that it has."""
    opening = json.loads(asked.readline())
    config = WandbConfig.model_validate(opening["wandb"])
    signal.alarm(int(config.timeout_s) + 2)  # should the worker be suspended
    run_id, folder = opening["run_id"], Path(opening["folder"])
    first, run = _begin(config, run_id, folder, opening["recipe"])
    answers.write(json.dumps({"next_step": first}) + "\n")
    sent = _log(run, asked, first)
    session = Path(run.dir).parent
    run.finish()
    _end_client()
    if config.mode == "online":
        shutil.rmtree(session, ignore_errors=True)  # it is on the server
    answers.write(json.dumps({"sent": sent}) + "\n")


def _end_with(worker: int) -> None:
    """End this session, whatever it is doing, once its worker has ended."""
    while os.getppid() == worker:
        time.sleep(_WATCH_PERIOD_S)
    os.killpg(0, signal.SIGKILL)


def _begin(config: WandbConfig, run_id: str, folder: Path, recipe: dict[str, Any]) -> tuple[int, Any]:
    import wandb

    from activities.metrics.wandb_files import next_step

    first = next_step(folder, run_id) if config.mode == "offline" else None
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        mode=config.mode,
        id=run_id,
        name=run_id,
        resume="allow" if config.mode == "online" else None,
        dir=str(folder),
        config=recipe,
        settings=wandb.Settings(init_timeout=config.timeout_s, **QUIET),
    )
    return (run.starting_step if first is None else first), run


def _end_client() -> None:
    """End the client's own process too, and wait for it: nobody else would."""
    import wandb

    wandb.teardown()


def _log(run: Any, asked: Iterable[str], first: int) -> int:
    sent = 0
    for line in asked:
        told = json.loads(line)
        if told["step"] >= first:
            run.log(told["metrics"], step=told["step"], commit=True)
            sent += 1
    return sent


if __name__ == "__main__":
    main()
