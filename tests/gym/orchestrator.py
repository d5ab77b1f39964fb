"""Plays the rollout worker against real Gym servers: opens rollouts, begins attempts, sends /run, reads the ledger."""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

import httpx

from storage.capture_ids import capture_id
from storage.ledger import Ledger
from storage.records import AttemptCall, BegunAttempt, Recovery
from workers.demo.dataset import row

RUN_TIMEOUT_S = 120.0
_ATTEMPT = re.compile(r'("[a-z_]*attempt_index":\s*)\d+')  # tells attempts apart by its own nature


@dataclass(frozen=True)
class Answer:
    """What an agent answered to /run."""

    status: int
    text: str

    @property
    def body(self) -> dict[str, Any]:
        assert self.status == 200, self.text
        return json.loads(self.text)

    @property
    def but_the_attempt(self) -> str:
        """The text as it came, with the number of the attempt left out."""
        return _ATTEMPT.sub(r"\1N", self.text)


class Orchestrator:
    """Of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def rollout(self) -> str:
        """An open rollout of a run of its own."""
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        await self.ledger.runs.create(run_id, f"queue-{run_id}", {}, "d" * 64, 10, "m" * 64)
        group = await self.ledger.groups.open(f"{run_id}/step-0/group-0", run_id, 0, 0, "train", "prompt-0", 0, 2)
        return group.rollouts[0].rollout_id

    async def begin(self, rollout_id: str, recovery: Recovery = "replay") -> BegunAttempt:
        """The next attempt; it fences the one before."""
        begun = await self.ledger.rollouts.begin_attempt(
            rollout_id, "worker-1", recovery=recovery, policy_version=0, max_replay_age_versions=0
        )
        assert isinstance(begun, BegunAttempt)
        return begun

    async def run(self, agent_url: str, rollout_id: str, attempt: int, seed: int = 11) -> Answer:
        """One /run request of the demo's environment."""
        gym_id = capture_id(rollout_id)
        body = {
            **row(seed=seed),
            "_ng_rollout_id": gym_id,
            "_ng_attempt_index": attempt,
            "context_compaction_rollout_id": gym_id,
            "context_compaction_attempt_index": attempt,
        }
        async with httpx.AsyncClient(timeout=RUN_TIMEOUT_S, trust_env=False) as client:
            answer = await client.post(f"{agent_url}/run", json=body)
        return Answer(answer.status_code, answer.text)

    async def calls(self, rollout_id: str, attempt: int) -> list[AttemptCall]:
        """The model calls of an attempt."""
        return await self.ledger.calls.of_attempt(rollout_id, attempt)


def outcomes(calls: list[AttemptCall]) -> str:
    """One letter for each call: generated, replayed, failed, measured."""
    return "".join(call.outcome[0] for call in calls)


def sampled(calls: list[AttemptCall]) -> list[tuple[object, ...]]:
    """What was sampled, and after which tokens."""
    answered = [call for call in calls if call.outcome in ("generated", "replayed")]
    return [
        (call.prompt_token_ids, call.sampled_token_ids, call.log_probs, call.weight_versions, call.response_id)
        for call in answered
    ]
