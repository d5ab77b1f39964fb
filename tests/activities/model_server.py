"""The model server in small: it claims, replays and records calls in the ledger before it gives a response away."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from storage.capture_ids import parse_capture_id
from storage.ledger import Ledger
from storage.records import CallPosition, GeneratedResponse, RecordedResponse, WeightSpan
from tests.rollouts.agent_server import Exchange, Reply


class ModelServer:
    """Answers the calls of one run. `generated` and `replayed` count them."""

    def __init__(self, ledger: Ledger, version: str = "policy-0") -> None:
        self.ledger = ledger
        self.version = version
        self.generated = 0
        self.replayed = 0

    def attempt(self, exchange: Exchange) -> "Conversation":
        """The model calls of the attempt that an agent was asked for."""
        body = exchange.body
        rollout_id, _ = parse_capture_id(body["_ng_rollout_id"])
        return Conversation(self, rollout_id, body["_ng_attempt_index"])

    def serving(self, answer: dict[str, Any], then: Reply | None = None, calls: int | None = None) -> Reply:
        """An agent that makes the calls of an answer (or the first ones), and answers with it or goes on otherwise."""

        async def reply(exchange: Exchange) -> None:
            conversation = self.attempt(exchange)
            items = [item for item in answer["response"]["output"] if item.get("generation_token_ids")]
            for item in items[:calls]:
                tokens = [item[key] for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")]
                await conversation.call(*tokens)
            await (then(exchange) if then else exchange.answer(200, answer_to(exchange, answer)))

        return reply


class Conversation:
    """The calls of one attempt, one after another."""

    def __init__(self, server: ModelServer, rollout_id: str, attempt: int) -> None:
        self._server = server
        self._rollout_id = rollout_id
        self._attempt = attempt
        self._last: RecordedResponse | None = None

    async def call(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        log_probs: Sequence[float] | None = None,
        finish_reason: str = "stop",
    ) -> RecordedResponse:
        """What is recorded for the prompt, else `sampled`, recorded."""
        server = self._server
        lease = await server.ledger.calls.claim(self._rollout_id, self._attempt, _fingerprint(prompt))
        if lease.recorded is not None:
            server.replayed += 1
            self._last = lease.recorded
            return self._last
        parent, before = None, self._last
        if before is not None:
            whole = (*before.prompt_token_ids, *before.sampled_token_ids)
            parent = before.position if tuple(prompt[: len(whole)]) == whole else None
        self._last = await server.ledger.calls.record(
            lease, self._response(lease.ordinal, parent, prompt, sampled, log_probs, finish_reason)
        )
        server.generated += 1
        return self._last

    async def fail(self, prompt: Sequence[int], failure_class: str, cause: str) -> None:
        """A call that gets no response."""
        calls = self._server.ledger.calls
        await calls.fail(await calls.claim(self._rollout_id, self._attempt, _fingerprint(prompt)), failure_class, cause)

    async def measure(self, prompt_tokens: int) -> None:
        """A prompt that is measured."""
        await self._server.ledger.calls.measure(self._rollout_id, self._attempt, prompt_tokens)

    async def abandon(self, prompt: Sequence[int]) -> None:
        """A call whose model server dies."""
        await self._server.ledger.calls.claim(self._rollout_id, self._attempt, _fingerprint(prompt))

    def _response(
        self,
        ordinal: int,
        parent: CallPosition | None,
        prompt: Sequence[int],
        sampled: Sequence[int],
        log_probs: Sequence[float] | None,
        finish_reason: str,
    ) -> GeneratedResponse:
        rewritten = parent is None and self._last is not None
        return GeneratedResponse(
            parent=parent,
            continuity="append" if parent else "new_segment" if rewritten else "root",
            continuity_reason="no earlier call is known" if rewritten else None,
            prompt_token_ids=tuple(prompt),
            sampled_token_ids=tuple(sampled),
            log_probs=tuple(log_probs or [-0.5] * len(sampled)),
            finish_reason=finish_reason,
            response_id=f"chatcmpl-{self._attempt}-{ordinal}",
            body=b"{}",
            weight_versions=(WeightSpan(version=self._server.version, start=0, end=len(sampled)),),
            conversation=None,
            started_at=datetime.now(UTC),
        )


def answer_to(exchange: Exchange, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with declarations that name the rollout which was asked for."""
    response = dict(answer["response"])
    if "model_call_metadata" in response:
        rollout = {"rollout_id": exchange.body["context_compaction_rollout_id"]}
        response["model_call_metadata"] = [entry | rollout for entry in response["model_call_metadata"]]
    return answer | {"response": response}


def _fingerprint(prompt: Sequence[int]) -> str:
    return hashlib.sha256(repr(list(prompt)).encode()).hexdigest()
