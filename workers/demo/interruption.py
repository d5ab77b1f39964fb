"""Kills the NeMo-Gym servers in the middle of the episodes of one step, and counts what the retries cost.

The agent, the environment and the model server die together, as when a machine is lost; the stack starts them again.
"""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from storage.ledger import Ledger
from workers.stack.control import status

POLL_S = 0.05
CALLS_BEFORE = 3  # of a rollout; the demo's episodes have about eight
GYM_SERVICE = "gym"


@dataclass(frozen=True)
class Interruption:
    """The step, and the rollouts that were in the middle of an attempt, with that attempt's number."""

    step: int
    attempts: dict[str, int]


@dataclass(frozen=True)
class RetryCost:
    """Of the attempts that were cut off and of those that finished their rollouts."""

    rollouts: int
    replayed_calls: int
    replayed_tokens: int
    in_flight_calls: int


async def interrupt(ledger: Ledger, run_id: str, step: int, state_dir: Path) -> Interruption:
    """Wait until a rollout of the step has made some calls and one is in flight, then kill the Gym servers.

    Runs until it is cancelled when the step never gets there.
    """
    while True:
        running = [
            one for one in await ledger.stalls.of(run_id, 0.0) if one.group_id.startswith(f"{run_id}/step-{step}/")
        ]
        if any(one.call is not None and one.call >= CALLS_BEFORE for one in running):
            server = next(service.process for service in status(state_dir) if service.name == GYM_SERVICE)
            if server is not None:
                os.kill(server.pid, signal.SIGKILL)
                return Interruption(step, {one.rollout_id: one.attempt for one in running})
        await asyncio.sleep(POLL_S)


async def cost_of(ledger: Ledger, interruption: Interruption) -> RetryCost:
    """What the retries replayed, and what they had to generate a second time: calls that were in flight."""
    replayed_calls = replayed_tokens = in_flight = 0
    for rollout_id, attempt in interruption.attempts.items():
        cut_off = await ledger.transcripts.of(rollout_id, attempt)
        in_flight += sum(turn.outcome == "abandoned" for turn in cut_off.turns)
        replayed = [turn for turn in (await ledger.transcripts.of(rollout_id)).turns if turn.outcome == "replayed"]
        replayed_calls += len(replayed)
        replayed_tokens += sum(turn.generated_tokens for turn in replayed)
    return RetryCost(len(interruption.attempts), replayed_calls, replayed_tokens, in_flight)


def told(interruption: Interruption, cost: RetryCost) -> str:
    """The cost in words."""
    return (
        f"step {interruption.step}: the agent server was killed in the middle of {cost.rollouts} rollouts. Their "
        f"retries replayed {cost.replayed_calls} recorded calls ({cost.replayed_tokens} tokens) from the ledger; "
        f"calls in flight at the kill, which were generated again: {cost.in_flight_calls}"
    )
