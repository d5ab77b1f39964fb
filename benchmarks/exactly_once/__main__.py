"""Whether a step is applied exactly once: the trainer is killed at every dangerous moment of a step, once each.

    python -m benchmarks.exactly_once --json OUT [--ranks 2]

Runs of 6 steps, whose batches are stored before they begin, by the product's own workflows, ledger and trainer worker
under torchrun, with a real Temporal and PostgreSQL. The first run is left alone, and so is the second, which shows that
nothing but chance could make them differ. In each of the others the trainer is killed with SIGKILL once, in step 3: see
`benchmarks.exactly_once.points` and `trainer`. Compared are the exported weights and the state of model and optimizer,
bit for bit, and the steps that the final weights consist of, as the engines wrote them down. Exits with 1
when anything differs, when a step is in the weights twice or not at all, or when a ledger breaks an invariant.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks import ending
from benchmarks.exactly_once import report
from benchmarks.exactly_once.points import POINTS, PointName
from benchmarks.exactly_once.runs import RunOutcome, run_once
from benchmarks.exactly_once.stack import Stack, exactly_once_stack


async def measured(stack: Stack, number: int, point: PointName | None) -> RunOutcome:
    """One run, with a line of progress."""
    run = await run_once(stack, number, point)
    print(f"{run.run_id}: killed {point or 'never'}: {run.wall_s:.1f} s, {run.applied} steps computed", flush=True)
    return run


async def main(points: list[PointName], ranks: int, json_file: Path | None) -> int:
    """Run, compare, print, write; the exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onbelay-benchmark-") as folder:
        async with exactly_once_stack(Path(folder), ranks) as stack:
            undisturbed = await measured(stack, 0, None)
            runs = [await measured(stack, 1, None)]
            for number, point in enumerate(points, start=2):
                runs.append(await measured(stack, number, point))
    Console(width=None if sys.stdout.isatty() else 140).print(report.table(undisturbed, runs))
    if json_file is not None:
        document = report.document(undisturbed, runs, ranks, time.monotonic() - started)
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    broken = report.broken(undisturbed, runs)
    print("\n".join(broken) or "every step was applied exactly once")
    return 1 if broken else 0


def asked() -> tuple[list[PointName], int, Path | None]:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exactly_once",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer")
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS), help="kill here only")
    arguments = parser.parse_args()
    return list(arguments.points), arguments.ranks, arguments.json


if __name__ == "__main__":
    sys.exit(ending.run(main(*asked())))
