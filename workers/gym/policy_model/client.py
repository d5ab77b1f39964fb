"""The policy model with a memory: a response is in the ledger before the agent gets it, and asked again it is replayed.

NeMo-Gym's model server talks to this client as to vLLM, whatever dialect the agent speaks. A call is claimed first;
the claim says whether this attempt is still the current one and whether the response is recorded already. If not, it is
generated on exact tokens, recorded, and only then released.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from datetime import UTC, datetime
from typing import Any

from aiohttp import ClientResponseError
from fastapi import HTTPException

from storage.errors import LineageBroken
from storage.records import CallLease, RecordedResponse
from workers.gym.capture.served import now_serving
from workers.gym.policy_model.caller import Caller
from workers.gym.policy_model.continuity import REQUIRED_PREFIX, continuation
from workers.gym.policy_model.errors import ContextOverflow, ContinuityBroken, ModelCallFailed
from workers.gym.policy_model.exact import ExactClient
from workers.gym.policy_model.fingerprint import fingerprint
from workers.gym.policy_model.identity import calling_attempt
from workers.gym.policy_model.recordable import recordable
from workers.gym.policy_model.recorded import released
from workers.gym.policy_model.recorder import Recorder
from workers.gym.policy_model.seeding import CallSeed
from workers.gym.policy_model.template import Template


class LedgerClient:
    """The two methods of NeMo-Gym's vLLM client that a policy model needs."""

    def __init__(
        self, exact: ExactClient, template: Template, recorder: Recorder, sampling_seed: int | None = None
    ) -> None:
        self._exact = exact
        self._template = template
        self._recorder = recorder
        self._sampling_seed = sampling_seed

    async def create_chat_completion(self, **body: Any) -> dict[str, Any]:
        """A chat completion with token ids and log-probabilities."""
        caller = calling_attempt()
        lease = await self._recorder.claim(caller, fingerprint(body, self._template.contract))
        response = lease.recorded or await self._generate(caller, lease, body)
        now_serving(caller.rollout_id, response)
        return released(response)

    async def create_tokenize(self, **body: Any) -> dict[str, Any]:
        """The prompt that a call with this body would send, token by token.

        A failure is recorded as a call's: else the last measured prompt would look like one that a guard refused.
        """
        caller = calling_attempt()
        try:
            going_on = await continuation(body, caller, self._recorder, self._template)
            prompt = await self._exact.measure(_request(body), going_on.prefix)
        except ModelCallFailed as error:
            lease = await self._recorder.claim(caller, fingerprint(body, self._template.contract))
            await self._recorder.fail(lease, error.failure_class, error.cause)
            raise answer_of(error) from error
        await self._recorder.measure(caller, len(prompt))
        return {"count": len(prompt), "tokens": prompt}

    async def _generate(self, caller: Caller, lease: CallLease, body: dict[str, Any]) -> RecordedResponse:
        started_at = datetime.now(UTC)
        try:
            going_on = await continuation(body, caller, self._recorder, self._template)
            completion = await self._exact.complete(_request(body), going_on.prefix, self._seed_of(lease))
            response = recordable(body, going_on, completion, started_at)
        except (asyncio.CancelledError, HTTPException):  # the agent hung up, or the ledger did not answer
            self._recorder.release(lease)
            raise
        except ModelCallFailed as error:
            await self._recorder.fail(lease, error.failure_class, error.cause)
            raise answer_of(error) from error
        except Exception as error:
            await self._recorder.fail(lease, type(error).__name__, str(error) or repr(error))
            raise
        try:
            return await self._recorder.record(lease, response)
        except LineageBroken as error:
            broken = ContinuityBroken(str(error))
            await self._recorder.fail(lease, broken.failure_class, broken.cause)
            raise answer_of(broken) from error

    def _seed_of(self, lease: CallLease) -> CallSeed | None:
        if self._sampling_seed is None:
            return None
        return CallSeed(self._sampling_seed, lease.rollout_id, lease.sample, lease.occurrence)


def answer_of(error: ModelCallFailed) -> Exception:
    """A failure as NeMo-Gym's model server understands it: it ends the episode of an agent whose prompt is too long
    with `finish_reason: length`, if it sees vLLM's own answer."""
    if not isinstance(error, ContextOverflow):
        return HTTPException(error.status, f"{error.failure_class}: {error.cause}")
    refused = ClientResponseError(None, (), status=int(error.status), message=error.cause)
    refused.response_content = error.content
    return refused


def _request(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != REQUIRED_PREFIX}
