"""What failures cost: tokens generated per token trained, groups lost, wall time, under four policies.

    python -m benchmarks.goodput --json OUT [--rates 0.5 2 5 15]

Real NeMo-Gym servers, the recording model server, PostgreSQL; the model samples a scripted tool episode of 3 to 7
calls. Attempts at rollouts fail at the given rates, in equal parts by an agent that raises, a model call that answers
500, a connection of /run that is reset, and a model call that never answers. The seeded trace of failures is the same
for all policies: drop the group (as NeMo-RL with context compaction), retry the group (as NeMo-RL without: up to five
attempts, back-off 1, 2, 4, 8 s), retry the failed rollout from its start, and Onbelay (replay what is recorded). See
`benchmarks.goodput.run` for how a step ends. Exits with 1 when Onbelay generates more than 1.03 tokens per trained
token or loses a group at a rate of up to 5 %, or when a ledger breaks an invariant.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import ending
from benchmarks.goodput import report
from benchmarks.goodput.policies import ONBELAY, POLICIES, Policy
from benchmarks.goodput.run import GoodputRun, RunCounts
from benchmarks.goodput.settings import Settings
from benchmarks.goodput.stack import GoodputStack, goodput_stack


async def measured(stack: GoodputStack, settings: Settings, policy: Policy, rate: float) -> RunCounts:
    """One run, with a line of progress."""
    run = await GoodputRun(stack, settings, policy, rate).run()
    injected = ", ".join(f"{count} {kind}" for kind, count in run.injected.items()) or "nothing"
    print(
        f"{policy.name:13} {rate:6.1%}  {run.wall_s:6.1f} s  generated {run.generated_tokens}, "
        f"trained {run.trained_tokens}, lost {run.groups_lost} groups, {run.steps_below_floor} steps below the floor; "
        f"injected: {injected}",
        flush=True,
    )
    return run


async def main(settings: Settings, json_file: Path | None) -> int:
    """Measure, print, write; the exit code."""
    with tempfile.TemporaryDirectory(prefix="onbelay-benchmark-") as folder:
        async with goodput_stack(Path(folder), settings) as stack:
            undisturbed = await measured(stack, settings, ONBELAY, 0.0)
            runs = [await measured(stack, settings, policy, rate) for rate in settings.rates for policy in POLICIES]
    Console(width=None if sys.stdout.isatty() else 140).print(report.table(settings, undisturbed, runs))
    if json_file is not None:
        json_file.write_text(json.dumps(report.document(settings, undisturbed, runs), indent=2) + "\n")
    for line in report.unplanned(undisturbed, runs):
        print(line)
    broken = report.broken(undisturbed, runs)
    print("\n".join(broken) or "every promise holds")
    return 1 if broken else 0


def percent(text: str) -> float:
    """A share above 0 and below 1, given in percent."""
    share = float(text) / 100
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100")
    return share


def asked() -> tuple[Settings, Path | None]:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument(
        "--rates", type=percent, nargs="+", default=[0.005, 0.02, 0.05, 0.15], help="failing attempts in percent"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=8, help="prompt groups of a step")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--floor", type=float, default=0.9, help="failure.min_step_batch_fraction")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--concurrent", type=int, default=4, help="rollouts in flight")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="rollouts.rollout_timeout_s, which ends a hang")
    parser.add_argument("--token-ms", type=float, default=1.0, help="how long the model takes for a token")
    arguments = parser.parse_args()
    settings = Settings(
        steps=arguments.steps,
        groups=arguments.groups,
        rollouts=arguments.rollouts,
        rates=tuple(dict.fromkeys(arguments.rates)),
        seed=arguments.seed,
        concurrent=arguments.concurrent,
        rollout_timeout_s=arguments.timeout_s,
        token_ms=arguments.token_ms,
        min_step_batch_fraction=arguments.floor,
    )
    return settings, arguments.json


if __name__ == "__main__":
    sys.exit(ending.run(main(*asked())))
