"""One attempt: the agent is run once, and its evidence comes from the ledger or from its own answer.

An attempt that ended for its content is evidence too, to be masked, unless the run wants a fresh sample; every other
end without an answer is the error of the boundary that was crossed.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from activities.errors import (
    AgentFailed,
    AgentRefused,
    AgentUnavailable,
    ContentFailure,
    EnvironmentFailed,
    EnvironmentRefused,
    ModelCallFailed,
    PolicyMismatch,
    RolloutTimeout,
)
from activities.generation.errors import ServerFailed, ServerUnreachable, WeightsUnknown
from activities.generation.vllm import PolicyVersions, VllmServer, policy_version
from activities.rollouts import answer_evidence, ledger_evidence
from activities.rollouts.answer import Answer, parse
from activities.rollouts.content import Content, content_failure, failed_last_call
from activities.rollouts.episode import episode_body, result_of
from activities.rollouts.evidence import Evidence
from activities.rollouts.gym_agent import GymAgents
from activities.rollouts.request import run_body
from configs.rollouts import RolloutsConfig
from storage.capture_ids import capture_id
from storage.ledger import Ledger
from storage.records import AttemptCall
from workflows.messages import RunRollout

_log = logging.getLogger(__name__)
_NO_RESULT = (AgentFailed, AgentRefused, AgentUnavailable, EnvironmentFailed, EnvironmentRefused, RolloutTimeout)
_SERVING_TIMEOUT_S = 20.0


class Attempts:
    """Runs attempts against the agents of a run."""

    def __init__(self, ledger: Ledger, agents: GymAgents, servers: Sequence[VllmServer]) -> None:
        self._ledger = ledger
        self._agents = agents
        self._servers = servers

    async def run(
        self,
        rules: RolloutsConfig,
        row: dict[str, Any],
        rollout: RunRollout,
        attempt: int,
        serving: PolicyVersions | None = None,
    ) -> Evidence:
        """Ask the agent, once the endpoints serve a policy version that may sample. `serving`: what they do, if known.

        Raises:
            PolicyMismatch: they do not.
            ContentFailure: the content ended the attempt, and `rollouts.on_content_failure` is `resample`.
            BoundaryError: whatever else ended it without usable evidence.
        """
        before = serving or await self.serving(rules, rollout)
        if rules.evidence == "ledger":
            return await self._recorded(rules, row, rollout, attempt)
        return await self._answered(rules, row, rollout, attempt, before)

    async def serving(self, rules: RolloutsConfig, rollout: RunRollout) -> PolicyVersions:
        """What the endpoints serve that are not in quarantine: versions of the rollout's range. An answer's own tokens
        know no version, so that they need the one that the group began with.

        Raises PolicyMismatch, which has the policy restored, also where one endpoint of several does not answer.
        """
        oldest = rollout.policy_version
        newest = newest_version(rollout) if rules.evidence == "ledger" else oldest
        allowed = f"policy-{oldest}" if newest == oldest else f"policy-{oldest} to policy-{newest}"
        servers = await self._sampling()
        try:
            async with asyncio.timeout(_SERVING_TIMEOUT_S):
                serving = await policy_version(servers)
        except TimeoutError as error:  # they answer one after another, also while they load weights
            raise PolicyMismatch(
                f"the vLLM endpoints did not say within {_SERVING_TIMEOUT_S:g} s what they serve; the rollout may be "
                f"sampled by {allowed}"
            ) from error
        except WeightsUnknown as error:
            raise PolicyMismatch(str(error)) from error
        except (ServerUnreachable, ServerFailed) as error:
            if len(servers) == 1:
                raise
            raise PolicyMismatch(f"one of {len(servers)} vLLM endpoints may have to be quarantined: {error}") from error
        if not oldest <= serving.min <= serving.max <= newest:
            raise PolicyMismatch(
                f"the vLLM endpoints serve policy-{serving.min} to policy-{serving.max}, the rollout may be sampled by "
                f"{allowed}"
            )
        return serving

    async def _sampling(self) -> list[VllmServer]:
        """The endpoints that sample: all but those in quarantine. A lone endpoint is never in quarantine."""
        if len(self._servers) <= 1:
            return list(self._servers)
        away = {quarantine.endpoint: quarantine for quarantine in await self._ledger.quarantines.open()}
        sampling = [server for server in self._servers if server.url not in away]
        if not sampling:
            reasons = "; ".join(f"{server.url} since {away[server.url].since:%H:%M:%S %Z}" for server in self._servers)
            raise PolicyMismatch(f"all vLLM endpoints are in quarantine: {reasons}")
        return sampling

    async def _recorded(
        self, rules: RolloutsConfig, row: dict[str, Any], rollout: RunRollout, attempt: int
    ) -> Evidence:
        """Evidence from the ledger. A refit in between does no harm: each call knows the weights that sampled it."""
        try:
            answer = await self._ask_agent(rules, row, rollout, attempt)
        except _NO_RESULT as error:
            answer = error
        calls = await self._ledger.calls.of_attempt(rollout.rollout_id, attempt)
        in_flight = await self._in_flight(rollout.rollout_id, attempt, calls)
        ended = None if isinstance(answer, Answer) else answer
        content = _accepted(content_failure(calls, ended, in_flight=in_flight), rules)
        if not isinstance(answer, Answer):
            if content is None:
                raise answer
            return ledger_evidence.unanswered(content, rollout.policy_version)
        failed = failed_last_call(calls)
        if failed is not None:
            raise ModelCallFailed(
                f"the agent ended its episode after call {failed.ordinal} had failed ({failed.failure_class}: "
                f"{failed.cause})"
            )
        return ledger_evidence.evidence(answer, calls, content, rollout.policy_version)

    async def _in_flight(self, rollout_id: str, attempt: int, calls: Sequence[AttemptCall]) -> bool:
        """Whether a call of the attempt was begun of which nobody wrote how it ended."""
        ended = {call.ordinal for call in calls}
        leases = await self._ledger.calls.leases(rollout_id, attempt)
        return any(lease.released_at is None and lease.ordinal not in ended for lease in leases)

    async def _answered(
        self, rules: RolloutsConfig, row: dict[str, Any], rollout: RunRollout, attempt: int, before: PolicyVersions
    ) -> Evidence:
        """Evidence from the answer, whose tokens are of the step's policy only if no server changed meanwhile."""
        answer = await self._ask_agent(rules, row, rollout, attempt)
        after = await self.serving(rules, rollout)
        if before.processes != after.processes:
            raise PolicyMismatch(
                "a vLLM server was started again during the attempt; its tokens may be of other weights"
            )
        _accepted(answer_evidence.content_failure(answer), rules)
        return answer_evidence.evidence(answer, rollout.policy_version, truncate=rules.truncate_noncontiguous_episodes)

    async def _ask_agent(self, rules: RolloutsConfig, row: dict[str, Any], rollout: RunRollout, attempt: int) -> Answer:
        name = row["agent_ref"]["name"]
        episode = self._agents.runs_episodes(name)
        body = (episode_body if episode else run_body)(row, rollout, attempt, rules)
        answer = await self._agents.run(
            name, body, timeout_s=rules.rollout_timeout_s, max_bytes=rules.max_response_bytes
        )
        parsed = parse(result_of(answer, body) if episode else answer, capture_id(rollout.rollout_id))
        if parsed.remark is not None:
            _log.warning("%s attempt %d counts in spite of %s", rollout.rollout_id, attempt, parsed.remark)
        return parsed


def newest_version(rollout: RunRollout) -> int:
    """The newest policy version that may sample for a rollout."""
    return rollout.policy_version if rollout.newest_policy_version is None else rollout.newest_policy_version


def _accepted(content: Content | None, rules: RolloutsConfig) -> Content | None:
    """The content failure, if it is to be masked."""
    if content is not None and rules.on_content_failure == "resample":
        raise ContentFailure(f"{content}: a replay would end the same way, so the next attempt begins a fresh sample")
    return content
