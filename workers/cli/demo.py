"""`onbelay demo`: the main job from nothing to a trained policy, on this machine.

It makes the tiny policy and its prompts, brings the embedded stack up, runs the steps, kills the agent server in the
middle of one of them and tells what the retries cost, prints the accounts, and takes the stack down again unless it was
up before.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.load import load_recipe
from configs.recipe import Recipe
from workers.cli import exits
from workers.cli.exits import CommandError
from workers.cli.progress import View, watch
from workers.cli.session import Session, addressed, session_of, state_dir
from workers.cli.starting import start_run
from workers.demo.dataset import write_datasets
from workers.demo.interruption import cost_of, interrupt, told
from workers.demo.policy import make_policy
from workers.stack.control import down, resolved_recipe, up

RECIPE = "demo"
INTERRUPTED_STEP = 2


def register(app: typer.Typer) -> None:
    """Add the `demo` command."""
    app.command("demo")(demo)


def demo(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Dotted overrides.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of reward and loss by step.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack up at the end.")] = False,
) -> None:
    """Train a tiny policy on NeMo-Gym rollouts, for real, without a GPU."""
    console = Console()
    for file in (json_file, plot):
        if file is not None and not file.parent.is_dir():
            exits.fail(f"{file}: the folder {file.parent} does not exist; create it first.", exits.USAGE)

    async def command() -> View:
        recipe = load_recipe(RECIPE, [f"grpo.max_num_steps={steps}", *(overrides or ())])
        prepare(recipe, console)
        was_up = resolved_recipe(state_dir()) is not None
        try:
            if not was_up:
                await up(recipe, state_dir(), lambda line: _say(console, line))
            async with session_of(addressed(recipe, RECIPE)) as opened:
                run_id = await start_run(opened, RECIPE)
                _say(console, f"run {run_id}")
                view, cost = await _watch_and_interrupt(opened, run_id, min(INTERRUPTED_STEP, steps - 1), console)
                _say(console, cost)
        finally:
            if not (keep or was_up):
                _say(console, "taking the stack down")
                await down(state_dir())
        return view

    view = exits.run(command())
    if plot is not None:
        _plot(view, plot)
        _say(console, f"plot: {plot}")
    accounts = view.summary.model_dump_json(indent=2)
    if json_file is not None:
        json_file.write_text(accounts + "\n")
    typer.echo(accounts)
    if view.summary.state != "completed":
        exits.fail(f"Run {view.summary.run_id} {view.summary.state}: {view.reason}")


def prepare(recipe: Recipe, console: Console) -> None:
    """Make the policy and the prompts the demo recipe names, unless they are there."""
    if recipe.run.dataset.parent != recipe.run.model.parent:
        raise CommandError(
            "The demo keeps run.model and run.dataset in one folder; leave them as they are.", exits.USAGE
        )
    make_policy(recipe.run.model, lambda line: _say(console, line))
    write_datasets(recipe.run.dataset.parent)


async def _watch_and_interrupt(opened: Session, run_id: str, step: int, console: Console) -> tuple[View, str]:
    """Watch the run, kill its agent server once in the middle of a step, and tell what that cost."""
    interruption = asyncio.create_task(interrupt(opened.ledger, run_id, step, state_dir()))
    try:
        view = await watch(opened, run_id, console)
    finally:
        interruption.cancel()
        await asyncio.wait({interruption})
    if interruption.cancelled():
        return view, f"step {step} was over before its agent server could be killed"
    return view, told(interruption.result(), await cost_of(opened.ledger, interruption.result()))


def _plot(view: View, file: Path) -> None:
    from workers.metrics.plot import plot_run

    steps = sorted(view.metrics)
    plot_run(
        file,
        [view.metrics[step]["train/reward"] for step in steps],
        [view.metrics[step]["train/loss"] for step in steps],
        title=view.summary.run_id,
        evaluations={
            evaluation.version: evaluation.mean_reward
            for evaluation in view.evaluations
            if evaluation.mean_reward is not None
        },
    )


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)
