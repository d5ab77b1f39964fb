"""What the runs show, against the one that nobody disturbed."""

import dataclasses
from typing import Any

from rich.table import Table

from benchmarks.exactly_once.points import KILLED_STEP, STEPS
from benchmarks.exactly_once.runs import RunOutcome


def weights_equal(undisturbed: RunOutcome, run: RunOutcome) -> bool:
    """The exported weights, bit for bit."""
    return bool(run.weights) and run.weights == undisturbed.weights


def state_equal(undisturbed: RunOutcome, run: RunOutcome) -> bool:
    """The trainer's model and optimizer at the last version, bit for bit."""
    return bool(run.state) and run.state == undisturbed.state


def lost_s(runs: list[RunOutcome], run: RunOutcome) -> float:
    """Against the second undisturbed run, the first of `runs`: the very first one also warms up."""
    return run.wall_s - runs[0].wall_s


def again(run: RunOutcome) -> int:
    """Optimizer steps that were computed more often than a run without kills would have."""
    return run.applied - STEPS


def name_of(run: RunOutcome) -> str:
    """What was done to the run."""
    return run.point or "nothing, once more"


def broken(undisturbed: RunOutcome, runs: list[RunOutcome]) -> list[str]:
    """Every promise that does not hold."""
    told: list[str] = []
    for run in (undisturbed, *runs):
        name = f"{run.run_id} ({name_of(run)})"
        if not weights_equal(undisturbed, run):
            told.append(f"{name}: the weights differ")
        if not state_equal(undisturbed, run):
            told.append(f"{name}: the optimizer's state differs")
        if run.twice:
            told.append(f"{name}: the final weights hold {run.twice} steps twice")
        if not run.is_exact:
            told.append(f"{name}: the final weights are not the stored batches in order: {run.chain}")
        if run.rows != STEPS:
            told.append(f"{name}: {run.rows} optimizer steps are recorded, not {STEPS}")
        told += [f"{name}: {problem}" for problem in run.problems]
    if undisturbed.applied != STEPS:
        told.append(f"the undisturbed run did {undisturbed.applied} optimizer steps, not {STEPS}")
    return told


def table(undisturbed: RunOutcome, runs: list[RunOutcome]) -> Table:
    """One line a run."""
    made = Table(title=f"{STEPS} steps, the trainer killed in step {KILLED_STEP}")
    made.add_column("killed")
    for column in ("weights equal", "optimizer equal", "applied twice", "recorded", "computed again", "seconds lost"):
        made.add_column(column, justify="right")
    for run in (undisturbed, *runs):
        reference = run is undisturbed
        made.add_row(
            "never (the reference)" if reference else name_of(run),
            "-" if reference else _word(weights_equal(undisturbed, run)),
            "-" if reference else _word(state_equal(undisturbed, run)),
            str(run.twice),
            str(run.rows),
            str(again(run)),
            "-" if reference else f"{lost_s(runs, run):.1f}",
        )
    return made


def document(undisturbed: RunOutcome, runs: list[RunOutcome], ranks: int, wall_s: float) -> dict[str, Any]:
    """All numbers."""
    return {
        "steps": STEPS,
        "killed_step": KILLED_STEP,
        "ranks": ranks,
        "wall_s": wall_s,
        "undisturbed": dataclasses.asdict(undisturbed),
        "runs": [
            {
                **dataclasses.asdict(run),
                "point": name_of(run),
                "weights_equal": weights_equal(undisturbed, run),
                "optimizer_equal": state_equal(undisturbed, run),
                "steps_applied_twice": run.twice,
                "steps_computed_again": again(run),
                "seconds_lost": lost_s(runs, run),
            }
            for run in runs
        ],
        "broken": broken(undisturbed, runs),
    }


def _word(holds: bool) -> str:
    return "yes" if holds else "NO"
