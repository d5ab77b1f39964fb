"""What a retry costs, in calls and tokens that are generated again: the recorded attempt against starting over.

    python -m benchmarks.retry_cost --json OUT

An episode of the demo (up to 10 calls, three segments) dies in its k-th call, for every k, in three ways: the agent
fails, every Gym process is killed with SIGKILL, the client's deadline passes. The retry is the product's own: ledger,
Gym servers, vLLM with the sampling demo policy. The baselines are counted from the same episodes: starting the rollout
over, and starting its group of 8 over. Exits with 1 when a recorded call was generated again, or tokens changed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.training.batch import TrainingBatch
from benchmarks import ending
from benchmarks.fault_proxy import Fault
from benchmarks.gym_stack import GymStack, gym_stack
from storage.records import AttemptCall, CallPosition, GeneratedResponse
from workflows.messages import RolloutResult, RunRollout

Way = Literal["agent_error", "process_killed", "client_timeout"]
FAULTS: dict[Way, Fault] = {"agent_error": "fail", "process_killed": "hold", "client_timeout": "hold"}
GROUP = 8
MOST_EPISODES = 40  # episodes that may end before their k-th call, until one is long enough
SLOW_S, QUICK_S = 120.0, 12.0


@dataclass(frozen=True)
class Cost:
    """Work that is done a second time."""

    calls: int
    tokens: int


@dataclass(frozen=True)
class Retry:
    """One episode that died in call `k`, and its second attempt."""

    way: Way
    k: int
    recorded: int
    replayed: int
    recorded_calls_regenerated: int
    tokens_identical: bool
    segments: int
    segments_identical: bool
    again_replay: Cost
    again_rollout: Cost
    again_group: Cost


class RetryCost:
    """The measurement: one rollout at a time, so that the proxy's count is that rollout's."""

    def __init__(self, stack: GymStack) -> None:
        self._stack = stack
        self._slot = 0

    async def measure(self, turns: int) -> list[Retry]:
        """All ways and all k."""
        await self._stack.start_run("retry", SLOW_S)
        await self._stack.start_run("timeout", QUICK_S)
        siblings = [await self._uninterrupted() for _ in range(GROUP - 1)]
        group = Cost(sum(cost.calls for cost in siblings), sum(cost.tokens for cost in siblings))
        print(f"a group of {GROUP}: the 7 siblings have {group.calls} calls, {group.tokens} sampled tokens")
        return [await self._retry(way, k, group) for way in get_args(Way) for k in range(1, turns + 1)]

    async def _uninterrupted(self) -> Cost:
        request = await self._open("retry")
        await self._run(request)
        return _cost(await self._calls(request, 0))

    async def _retry(self, way: Way, k: int, siblings: Cost) -> Retry:
        request = await self._die(way, k)
        before = [call for call in await self._calls(request, 0) if call.outcome == "generated"]
        generations = self._stack.proxy.generations
        result = await self._run(request)
        generated = self._stack.proxy.generations - generations
        after = await self._calls(request, 1)
        replayed = [call for call in after if call.outcome == "replayed"]
        recorded = _cost(before)
        started_over = Cost(recorded.calls + 1, recorded.tokens)  # and the call in flight, which every retry repeats
        retry = Retry(
            way=way,
            k=k,
            recorded=len(before),
            replayed=len(replayed),
            recorded_calls_regenerated=generated - (len(after) - len(before)),
            tokens_identical=[_evidence(call) for call in replayed] == [_evidence(call) for call in before],
            segments=result.segments,
            segments_identical=await self._same_as_uninterrupted(request, after),
            again_replay=Cost(1, 0),
            again_rollout=started_over,
            again_group=Cost(started_over.calls + siblings.calls, started_over.tokens + siblings.tokens),
        )
        print(_line(retry), flush=True)
        return retry

    async def _die(self, way: Way, k: int) -> RunRollout:
        """A rollout whose attempt 0 died in its k-th call."""
        for _ in range(MOST_EPISODES):
            request = await self._open("timeout" if way == "client_timeout" else "retry")
            self._stack.proxy.arm(FAULTS[way], k)
            attempt = asyncio.create_task(self._run(request))
            reached = asyncio.create_task(asyncio.to_thread(self._stack.proxy.reached.wait, SLOW_S))
            await asyncio.wait({attempt, reached}, return_when=asyncio.FIRST_COMPLETED)
            died = self._stack.proxy.reached.is_set()
            if died and way == "process_killed":
                await self._stack.kill_gym()
            with suppress(ApplicationError):
                await attempt
            self._stack.proxy.reached.set()
            await reached
            self._stack.proxy.disarm()
            if died and way == "process_killed":
                await self._stack.start_gym()
            if died:
                return request
        raise SystemExit(f"no episode of {MOST_EPISODES} came to a call {k}; the policy plays shorter episodes")

    async def _same_as_uninterrupted(self, request: RunRollout, calls: Sequence[AttemptCall]) -> bool:
        """Give another rollout the same recorded responses, run it without a fault, and compare the segments."""
        twin = await self._open(request.run_id, request.row_index)
        rollouts = self._stack.ledger.rollouts
        begun = await rollouts.begin_attempt(
            twin.rollout_id, "benchmark", recovery="replay", policy_version=0, max_replay_age_versions=1
        )
        places: dict[tuple[int, int], CallPosition] = {}
        for call in calls:
            assert call.position is not None
            assert call.fingerprint is not None
            assert call.body is not None
            lease = await self._stack.ledger.calls.claim(twin.rollout_id, 0, call.fingerprint)
            parent = None if call.parent is None else places[call.parent.attempt, call.parent.ordinal]
            response = GeneratedResponse(
                parent=parent,
                continuity=call.continuity or "root",
                continuity_reason=call.continuity_reason,
                prompt_token_ids=call.prompt_token_ids,
                sampled_token_ids=call.sampled_token_ids,
                log_probs=call.log_probs,
                finish_reason=call.finish_reason,
                response_id=call.response_id or "",
                body=call.body,
                weight_versions=call.weight_versions,
                conversation=None,
                started_at=call.started_at,
            )
            recorded = await self._stack.ledger.calls.record(lease, response)
            places[call.position.attempt, call.position.ordinal] = recorded.position
        assert not hasattr(begun, "state")
        await rollouts.fail_attempt(twin.rollout_id, 0, "agent", "infra", "AgentFailed", "stands for a failure")
        generations = self._stack.proxy.generations
        await self._run(twin)
        return generations == self._stack.proxy.generations and await self._rows(request) == await self._rows(twin)

    async def _rows(self, request: RunRollout) -> list[tuple[list[int], list[int], list[float]]]:
        group = await self._stack.ledger.groups.get(request.group_id)
        digest = group.rollouts[0].evidence_digest
        assert digest is not None, f"{request.rollout_id} has no rows: {group.rollouts[0].reason}"
        rows = TrainingBatch.from_bytes(await self._stack.blobs.get(digest)).rows
        return [(row.tokens.tolist(), row.loss_mask.tolist(), row.log_probs.tolist()) for row in rows]

    async def _run(self, request: RunRollout) -> RolloutResult:
        return await ActivityEnvironment().run(self._stack.activities().run_rollout, request)

    async def _calls(self, request: RunRollout, attempt: int) -> list[AttemptCall]:
        return await self._stack.ledger.calls.of_attempt(request.rollout_id, attempt)

    async def _open(self, run_id: str, row_index: int | None = None) -> RunRollout:
        slot, self._slot = self._slot, self._slot + 1
        row = slot if row_index is None else row_index
        group_id = f"{run_id}/step-0/group-{slot}"
        await self._stack.ledger.groups.open(group_id, run_id, 0, slot, "train", f"row-{row}", row, 1)
        return RunRollout(
            run_id=run_id,
            group_id=group_id,
            rollout_id=f"{group_id}/rollout-0",
            step=0,
            slot=slot,
            index=0,
            row_index=row,
            purpose="train",
            policy_version=0,
        )


def _cost(calls: Sequence[AttemptCall]) -> Cost:
    generated = [call for call in calls if call.outcome == "generated"]
    return Cost(len(generated), sum(call.generated_tokens for call in generated))


def _evidence(call: AttemptCall) -> tuple[object, ...]:
    return call.prompt_token_ids, call.sampled_token_ids, call.log_probs, call.response_id, call.weight_versions


def _line(retry: Retry) -> str:
    return (
        f"{retry.way:15} k={retry.k:2}  recorded {retry.recorded:2}  replayed {retry.replayed:2}  "
        f"generated again: {retry.recorded_calls_regenerated} recorded calls; starting over would cost "
        f"{retry.again_rollout.calls:2} calls ({retry.again_rollout.tokens} tokens), the group "
        f"{retry.again_group.calls} ({retry.again_group.tokens})  "
        f"{'same tokens' if retry.tokens_identical else 'OTHER TOKENS'}, "
        f"{'same segments' if retry.segments_identical else 'OTHER SEGMENTS'} ({retry.segments})"
    )


def holds(retry: Retry) -> bool:
    """What a retry promises."""
    return (
        retry.recorded_calls_regenerated == 0
        and retry.recorded == retry.replayed == retry.k - 1
        and retry.tokens_identical
        and retry.segments_identical
    )


async def main(json_file: Path | None, turns: int) -> int:
    """Measure, print, write; the exit code."""
    with tempfile.TemporaryDirectory(prefix="onbelay-benchmark-") as folder:
        async with gym_stack(Path(folder)) as stack:
            retries = await RetryCost(stack).measure(turns)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(retry) for retry in retries], indent=2) + "\n")
    broken = [retry for retry in retries if not holds(retry)]
    print(f"{len(retries)} retries, {len(broken)} broke their promise")
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retry_cost", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--turns", type=int, default=10, help="die in each of the calls 1 to this one")
    arguments = parser.parse_args()
    sys.exit(ending.run(main(arguments.json, arguments.turns)))
