"""Live progress of a run, read from the ledger: one screen in a terminal, plain lines otherwise.

Watching changes nothing; the run goes on without a watcher.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from storage.records import EvaluationRecord, GroupRecord
from storage.summaries import RunSummary
from workers.cli.session import Session
from workers.cli.tables import new_table

POLL_S = 1.0
_SHOWN_STEPS = 12
_OVER = ("completed", "stopped", "failed", "terminated")


@dataclass(frozen=True)
class View:
    """What the ledger says at one moment. `groups` are those of the next step, and of the steps that were applied since
    the view before."""

    summary: RunSummary
    reason: str | None
    metrics: dict[int, dict[str, float]]
    evaluations: list[EvaluationRecord]
    groups: list[GroupRecord]


@dataclass
class Seen:
    """What a watcher was told already."""

    steps: set[int] = field(default_factory=set)
    evaluations: set[int] = field(default_factory=set)
    groups: dict[str, str] = field(default_factory=dict)
    failures: set[tuple[str, int]] = field(default_factory=set)


async def watch(session: Session, run_id: str, console: Console) -> View:
    """Show progress until the run is over; returns the last view."""
    link = session.ui_link(run_id)
    if link:
        console.print(f"Temporal UI: {link}", soft_wrap=True, highlight=False)
    if console.is_terminal and sys.stdout.isatty():
        with Live(console=console, refresh_per_second=4) as live:
            return await _poll(session, run_id, lambda view: live.update(screen(view)))
    seen = Seen()

    def show(view: View) -> None:
        for line in news(view, seen):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return await _poll(session, run_id, show)


async def _poll(session: Session, run_id: str, show: Callable[[View], None]) -> View:
    since: int | None = None
    while True:
        view = await read(session, run_id, since)
        show(view)
        if view.summary.state in _OVER:
            return view
        since = view.summary.steps_applied
        await asyncio.sleep(POLL_S)


async def read(session: Session, run_id: str, since: int | None = None) -> View:
    """Read the ledger once. `since`: the next step of the view before, if there was one."""
    ledger = session.ledger
    summary = await ledger.summaries.of(run_id)
    first = summary.steps_applied if since is None else since
    steps = [
        await ledger.groups.list(run_id, step=step, purpose="train") for step in range(first, summary.steps_applied + 1)
    ]
    record = await ledger.runs.get(run_id)
    return View(
        summary=summary,
        reason=record.reason,
        metrics=await ledger.steps.metrics(run_id),
        evaluations=await ledger.evaluations.list(run_id),
        groups=[group for groups in steps for group in groups],
    )


def step_line(step: int, metrics: dict[str, float]) -> str:
    """One applied step in one line."""
    parts = [f"step {step} applied"]
    for name, key, form in (
        ("reward", "train/reward", ".3f"),
        ("loss", "train/loss", ".4f"),
        ("kl", "train/kl_penalty", ".4f"),
        ("grad norm", "train/grad_norm", ".3f"),
        ("log-prob gap", "train/logprob_gap_max", ".1e"),
        ("its mean", "train/logprob_gap_mean", ".1e"),
        ("rollouts s", "timing/train/exposed_generation", ".1f"),
        ("step s", "timing/train/total_step_time", ".1f"),
    ):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:{form}}")
    return "  ".join(parts)


def news(view: View, seen: Seen) -> list[str]:
    """Lines for what is new since `seen`, which is brought up to date."""
    current = current_groups(view)
    lines = _failures(view, seen)
    lines += _groups([group for group in view.groups if group.train_step < view.summary.steps_applied], seen)
    for evaluation in view.evaluations:
        if evaluation.version not in seen.evaluations:
            seen.evaluations.add(evaluation.version)
            lines.append(evaluation_line(evaluation))
    for step in sorted(set(view.metrics) - seen.steps):
        seen.steps.add(step)
        lines.append(step_line(step, view.metrics[step]))
    lines += _groups(current, seen)
    if view.summary.state in _OVER:
        why = f": {view.reason}" if view.reason else ""
        lines.append(f"run {view.summary.run_id} {view.summary.state}{why}")
    return lines


def current_groups(view: View) -> list[GroupRecord]:
    """Those of the next step."""
    return [group for group in view.groups if group.train_step == view.summary.steps_applied]


def _groups(groups: Sequence[GroupRecord], seen: Seen) -> list[str]:
    """Groups that are no longer open. One that is trained was told of when it was sealed, unless both came at once."""
    lines: list[str] = []
    for group in groups:
        before = seen.groups.get(group.group_id)
        if group.state in ("open", before):
            continue
        seen.groups[group.group_id] = group.state
        if (before, group.state) != ("sealed", "trained"):
            rewards = [f"{r.reward:.2f}" for r in group.rollouts if r.state == "valid" and r.reward is not None]
            why = f" ({group.reason})" if group.reason else ""
            told = f": rewards {' '.join(rewards)}" if rewards else ""
            lines.append(f"  {group.group_id} {group.state}{why}{told}")
    return lines


def _failures(view: View, seen: Seen) -> list[str]:
    """Attempts that ended badly. What killed many at once is told once."""
    causes: dict[str, list[str]] = {}
    for group in view.groups:
        for rollout in group.rollouts:
            for attempt in rollout.attempts:
                key = (rollout.rollout_id, attempt.attempt)
                if attempt.state in ("failed", "abandoned") and key not in seen.failures:
                    seen.failures.add(key)
                    why = f"{attempt.failure_class}: {attempt.cause}" if attempt.failure_class else "its worker died"
                    named = f"{rollout.rollout_id} attempt {attempt.attempt}"
                    causes.setdefault(f"{attempt.state}: {why}", []).append(named)
    return [f"  {_and_others(named)} {cause}"[:300] for cause, named in causes.items()]


def _and_others(named: list[str]) -> str:
    return named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} others"


def evaluation_line(evaluation: EvaluationRecord) -> str:
    """One evaluation in one line."""
    mean = "none" if evaluation.mean_reward is None else f"{evaluation.mean_reward:.3f}"
    return (
        f"evaluation of policy-{evaluation.version}: mean reward {mean} "
        f"over {evaluation.rollouts} rollouts of prompts that are never trained"
    )


def screen(view: View) -> Group:
    """The screen of a terminal."""
    summary = view.summary
    head = Text.assemble(
        (summary.run_id, "bold"),
        f"  {summary.state}  policy-{summary.policy_version}  steps {summary.steps_applied}  refits {summary.refits}",
    )
    counts = Table.grid(padding=(0, 2))
    counts.add_row("groups", *_counts(summary.groups.model_dump()))
    counts.add_row("rollouts", *_counts(summary.rollouts.model_dump()))
    counts.add_row("attempts", *_counts(summary.attempts.model_dump()))
    steps = Table(title="applied steps", title_justify="left")
    for column in ("step", "reward", "loss", "log-prob gap", "its mean", "seconds"):
        steps.add_column(column, justify="right")
    for step in sorted(view.metrics)[-_SHOWN_STEPS:]:
        values = view.metrics[step]
        steps.add_row(
            str(step),
            f"{values.get('train/reward', float('nan')):.3f}",
            f"{values.get('train/loss', float('nan')):.4f}",
            f"{values.get('train/logprob_gap_max', float('nan')):.1e}",
            f"{values.get('train/logprob_gap_mean', float('nan')):.1e}",
            f"{values.get('timing/train/total_step_time', float('nan')):.1f}",
        )
    groups = new_table("group", "state", "rollouts", "last failure", title=f"groups of step {summary.steps_applied}")
    current = current_groups(view)
    for group in current:
        marks = " ".join(
            "·" if rollout.state == "open" else rollout.state if rollout.reward is None else f"{rollout.reward:.2f}"
            for rollout in group.rollouts
        )
        groups.add_row(group.group_id, group.state, marks, _last_failure(group))
    evaluations = Text("\n".join(evaluation_line(evaluation) for evaluation in view.evaluations))
    return Group(head, counts, steps, *([groups] if current else []), evaluations)


def _counts(values: dict[str, int]) -> list[str]:
    return [f"{name} {value}" for name, value in values.items()]


def _last_failure(group: GroupRecord) -> str:
    failed = [a for rollout in group.rollouts for a in rollout.attempts if a.failure_class]
    return f"{failed[-1].failure_class}: {failed[-1].cause}"[:80] if failed else ""
