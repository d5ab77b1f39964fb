"""Short ways to write what a test's story needs into the ledger."""

import asyncio
import sys
import uuid
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.ledger import Ledger
from storage.records import (
    ActionRecord,
    BatchRecord,
    BegunAttempt,
    Bucket,
    GeneratedResponse,
    GroupRecord,
    Purpose,
    RecordedResponse,
    Recovery,
    ReportedCall,
    RunRecord,
    SelectedResponse,
    SettledRollout,
    Settlement,
    WeightSpan,
)
from storage.trainer_leases import TrainerLease

TRAINER_LEASE_S = 600.0
CALLS = (
    ReportedCall(prompt_tokens=100, generated_tokens=10, finish_reason="tool_calls", response_id="a"),
    ReportedCall(prompt_tokens=60, generated_tokens=20, finish_reason="stop", response_id="b"),
)
SELECTED = (
    SelectedResponse(ordinal=0, segment=0, boundary=None),
    SelectedResponse(ordinal=1, segment=1, boundary="compaction"),
)

PROCESS_DEADLINE_S = 120.0
MIGRATE = """
import asyncio, sys
from configs.storage import StorageConfig
from storage.migrate import migrate
asyncio.run(migrate(StorageConfig(dsn=sys.stdin.read())))
"""


async def start_run(ledger: Ledger) -> RunRecord:
    """A run with a name and a task queue of its own."""
    run_id = f"run-{uuid.uuid4().hex}"
    return await ledger.runs.create(run_id, f"queue-{run_id}", {"grpo": {"seed": 1}}, "d" * 64, 100, "m" * 64)


@dataclass(frozen=True)
class Story:
    """One run and the ledger it is in."""

    ledger: Ledger
    run_id: str

    def group_id(self, step: int, slot: int) -> str:
        return f"{self.run_id}/step-{step}/group-{slot}"

    async def group(
        self,
        step: int = 0,
        slot: int = 0,
        num_rollouts: int = 2,
        purpose: Purpose = "train",
        replaces: str | None = None,
    ) -> GroupRecord:
        """An open group."""
        part = f"step-{step}" if purpose == "train" else f"eval-{step}"
        group_id = f"{self.run_id}/{part}/group-{slot}"
        return await self.ledger.groups.open(
            group_id, self.run_id, step, slot, purpose, f"prompt-{slot}", slot, num_rollouts, replaces
        )

    async def try_to_begin(
        self,
        rollout_id: str,
        recovery: Recovery = "replay",
        policy_version: int = 0,
        max_replay_age_versions: int = 0,
        fresh_after: int | None = None,
    ) -> BegunAttempt | SettledRollout:
        """A new attempt, if the rollout is open."""
        return await self.ledger.rollouts.begin_attempt(
            rollout_id,
            "worker-1",
            recovery=recovery,
            policy_version=policy_version,
            max_replay_age_versions=max_replay_age_versions,
            fresh_after=fresh_after,
        )

    async def begin(self, rollout_id: str) -> int:
        """A new attempt that replays."""
        begun = await self.try_to_begin(rollout_id)
        assert isinstance(begun, BegunAttempt)
        return begun.attempt

    async def open_rollout(self) -> str:
        """The one rollout of an open group."""
        return (await self.group(num_rollouts=1)).rollouts[0].rollout_id

    async def generate(
        self,
        rollout_id: str,
        attempt: int,
        prompt: Sequence[int] = (1, 2, 3),
        sampled: Sequence[int] = (4, 5),
        after: RecordedResponse | None = None,
        fingerprint: str = "request",
        **changes: Any,
    ) -> RecordedResponse:
        """A recorded response: the first of a conversation, or one that continues `after`."""
        lease = await self.ledger.calls.claim(rollout_id, attempt, fingerprint)
        assert lease.recorded is None
        return await self.ledger.calls.record(lease, generated(prompt, sampled, after, **changes))

    async def fail(self, rollout_id: str) -> int:
        """An attempt that fails for a reason of the infrastructure."""
        attempt = await self.begin(rollout_id)
        await self.ledger.rollouts.fail_attempt(rollout_id, attempt, "agent", "infra", "http_500", "the agent said 500")
        return attempt

    async def settle(self, rollout_id: str, reward: float) -> None:
        """An attempt that ends with a valid rollout."""
        await self.ledger.rollouts.settle(valid(rollout_id, await self.begin(rollout_id), reward))

    async def sealed_group(
        self, rewards: Sequence[float], step: int = 0, slot: int = 0, replaces: str | None = None
    ) -> GroupRecord:
        """A sealed group with one valid rollout per reward."""
        group = await self.group(step, slot, len(rewards), replaces=replaces)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            await self.settle(rollout.rollout_id, reward)
        return await self.ledger.groups.set_state(group.group_id, "sealed")

    async def set_aside_group(
        self, step: int = 0, slot: int = 0, reward: float = 1.0, replaces: str | None = None
    ) -> GroupRecord:
        """A group of two whose rewards are equal; it was set aside."""
        group = await self.group(step, slot, 2, replaces=replaces)
        for rollout in group.rollouts:
            await self.settle(rollout.rollout_id, reward)
        return await self.ledger.groups.set_state(group.group_id, "set_aside", reason="equal rewards")

    async def dropped_group(
        self, step: int = 0, slot: int = 0, bucket: Bucket | None = "infra", replaces: str | None = None
    ) -> GroupRecord:
        """A dropped group; its only rollout is lost."""
        group = await self.group(step, slot, 1, replaces=replaces)
        await self.ledger.rollouts.lose(group.rollouts[0].rollout_id, "lost", "budget used up")
        return await self.ledger.groups.set_state(group.group_id, "dropped", bucket, "no valid rollout")

    async def give_up(self, group_id: str) -> GroupRecord:
        """A dropped group that is there: what is open of it is lost."""
        group = await self.ledger.groups.get(group_id)
        for rollout in group.rollouts:
            await self.ledger.rollouts.lose(rollout.rollout_id, "lost", "given up")
        return await self.ledger.groups.set_state(group_id, "dropped", None, "given up")

    async def batch(self, group_ids: Sequence[str], step: int = 0, digest: str = "b" * 64) -> BatchRecord:
        """A stored batch."""
        return await self.ledger.batches.store(
            self.run_id,
            step,
            digest,
            rows=4,
            rollouts=2,
            trained_tokens=60,
            segments_max=2,
            mean_reward=0.5,
            group_ids=group_ids,
        )

    async def train(self, group_ids: Sequence[str], step: int = 0) -> None:
        """A step that is applied to these groups."""
        batch = await self.batch(group_ids, step)
        await self.ledger.steps.apply(await self.lease(), step, batch.digest, {"loss": 0.25}, 0)

    async def lease(self, holder: str = "trainer") -> TrainerLease:
        """The right to write for the run's trainer; the one given before is fenced."""
        return await self.ledger.trainer_leases.acquire(self.run_id, holder, TRAINER_LEASE_S)


def action(run_id: str, **changes: Any) -> ActionRecord:
    """An operator's request that was done."""
    asked = {
        "action_id": f"{run_id}#{uuid.uuid4().hex}",
        "run_id": run_id,
        "target": f"{run_id}/step-0/group-0",
        "verb": "retry",
        "actor": "alice",
        "reason": "the environment is back",
        "arguments": {"fresh": True},
        "outcome": "done",
        "detail": "1 rollout runs again",
    }
    return ActionRecord.model_validate(asked | changes)


def valid(rollout_id: str, attempt: int, reward: float = 1.0) -> Settlement:
    """The settlement of a valid rollout whose agent reported its calls."""
    return Settlement(
        rollout_id=rollout_id,
        attempt=attempt,
        state="valid",
        reward=reward,
        policy_version_min=0,
        policy_version_max=0,
        evidence_digest="e" * 64,
        segments=2,
        selected=SELECTED,
        reported=CALLS,
    )


def selecting(rollout_id: str, attempt: int, ordinals: Sequence[int], reward: float = 1.0) -> Settlement:
    """The settlement of a valid rollout of one segment that went through these calls of the ledger."""
    return Settlement(
        rollout_id=rollout_id,
        attempt=attempt,
        state="valid",
        reward=reward,
        policy_version_min=0,
        policy_version_max=0,
        evidence_digest="e" * 64,
        segments=1,
        selected=tuple(SelectedResponse(ordinal=ordinal, segment=0, boundary=None) for ordinal in ordinals),
    )


def generated(
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    after: RecordedResponse | None = None,
    **changes: Any,
) -> GeneratedResponse:
    """What a model server hands over: the first response of a conversation, or one that continues `after`."""
    response = {
        "parent": None if after is None else after.position,
        "continuity": "root" if after is None else "append",
        "continuity_reason": None,
        "prompt_token_ids": tuple(prompt),
        "sampled_token_ids": tuple(sampled),
        "log_probs": tuple(-0.1 * (place + 1) for place in range(len(sampled))),
        "finish_reason": "stop",
        "response_id": "chatcmpl-1",
        "body": b'{"id": "chatcmpl-1"}',
        "weight_versions": (WeightSpan(version="policy-0", start=0, end=len(sampled)),),
        "conversation": None,
        "started_at": datetime.now(UTC),
    }
    return GeneratedResponse.model_validate(response | changes)


async def migrating_process(dsn: str) -> tuple[int | None, str]:
    """A process of its own that migrates: its exit status and what it complained of."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MIGRATE, cwd=Path(__file__).parents[2], stdin=PIPE, stderr=PIPE
    )
    try:
        _, complaints = await asyncio.wait_for(process.communicate(dsn.encode()), PROCESS_DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, complaints.decode()
