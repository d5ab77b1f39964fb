"""What the runs say: the table, the JSON, and whether Onbelay kept its promise."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.goodput.policies import ONBELAY, POLICIES
from benchmarks.goodput.run import RunCounts
from benchmarks.goodput.settings import Settings
from benchmarks.goodput.trace import FailureTrace

PROMISED_UP_TO = 0.05
MOST_GENERATED_PER_TRAINED = 1.03


def table(settings: Settings, undisturbed: RunCounts, runs: Sequence[RunCounts]) -> Table:
    """One line for each rate and policy; x compares with the run without failures."""
    title = (
        f"{settings.steps} steps x {settings.groups} groups x {settings.rollouts} rollouts, a step needs "
        f"{settings.floor} groups; without failures: {undisturbed.trained_tokens} tokens in {undisturbed.wall_s:.0f} s"
    )
    shown = Table(title=title)
    shown.add_column("failure rate (first attempts)", justify="right")
    shown.add_column("policy")
    for heading in (
        "generated per trained token",
        "per token of kept groups",
        "groups lost",
        "steps below the floor",
        "wall time",
    ):
        shown.add_column(heading, justify="right")
    titles = {policy.name: policy.title for policy in POLICIES}
    last: float | None = None
    for run in runs:
        if last not in (None, run.rate):
            shown.add_section()
        shown.add_row(
            "" if run.rate == last else f"{run.rate:.1%} ({_failing(settings, run.rate)})",
            titles[run.policy],
            _ratio(run.generated_per_trained),
            _ratio(run.generated_per_kept),
            f"{run.groups_lost} of {run.groups}",
            f"{run.steps_below_floor} of {run.steps}",
            f"{run.wall_s:.0f} s ({run.wall_s / undisturbed.wall_s:.2f} x)",
        )
        last = run.rate
    return shown


def document(settings: Settings, undisturbed: RunCounts, runs: Sequence[RunCounts]) -> dict[str, Any]:
    """Everything that was counted."""
    return {
        "settings": asdict(settings) | {"floor": settings.floor},
        "undisturbed": _counts(undisturbed, undisturbed),
        "runs": [_counts(run, undisturbed) for run in runs],
        "broken": broken(undisturbed, runs),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
    }


def broken(undisturbed: RunCounts, runs: Sequence[RunCounts]) -> list[str]:
    """What Onbelay promises up to a failure rate of 5 % and does not keep, and invariants that a ledger breaks."""
    found: list[str] = []
    for run in (undisturbed, *runs):
        name = f"{run.policy} at {run.rate:.1%}"
        found += [f"{name}: the ledger breaks an invariant: {violation}" for violation in run.violations]
        if run.policy != ONBELAY.name or run.rate > PROMISED_UP_TO:
            continue
        for counted, ratio in (("ledger", run.generated_per_trained), ("model server", run.sampled_per_trained)):
            if ratio is None or ratio > MOST_GENERATED_PER_TRAINED:
                found.append(
                    f"{name}: {_ratio(ratio)} tokens generated per trained token ({counted}), promised are at most "
                    f"{MOST_GENERATED_PER_TRAINED}"
                )
        if run.groups_lost:
            found.append(f"{name}: {run.groups_lost} groups lost, promised is none")
    return found


def unplanned(undisturbed: RunCounts, runs: Sequence[RunCounts]) -> list[str]:
    """Failures that are not the trace's, as on a machine so busy that a sound rollout meets its deadline."""
    return [
        f"{run.policy} at {run.rate:.1%}: not of the trace: {failure}"
        for run in (undisturbed, *runs)
        for failure in run.unplanned
    ]


def _counts(run: RunCounts, undisturbed: RunCounts) -> dict[str, Any]:
    return asdict(run) | {
        "generated_per_trained": run.generated_per_trained,
        "sampled_per_trained": run.sampled_per_trained,
        "generated_per_kept": run.generated_per_kept,
        "wall_to_undisturbed": run.wall_s / undisturbed.wall_s,
    }


def _failing(settings: Settings, rate: float) -> str:
    first = FailureTrace(settings.seed, rate).first_attempts(settings.prompts, settings.rollouts)
    return f"{first} of {settings.prompts * settings.rollouts}"


def _ratio(value: float | None) -> str:
    return "nothing trained" if value is None else f"{value:.3f}"
