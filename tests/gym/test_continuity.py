"""What a model call goes on from, and why it does not where it does not."""

import hashlib
from collections.abc import Sequence

import pytest

from storage.call_payloads import pack_tokens, tokens_digest
from storage.records import CallPosition, ParentCall
from workers.gym.policy_model.caller import Caller
from workers.gym.policy_model.continuity import Continuation, continuation
from workers.gym.policy_model.conversation import own_key

CALLER = Caller("run/step-0/group-0/rollout-0", 1)
FIRST = {"messages": [{"role": "user", "content": "hello"}]}
ANSWER = {"role": "assistant", "content": "hi"}
SECOND = {"messages": [*FIRST["messages"], ANSWER, {"role": "user", "content": "go on"}]}


def digest_of(token_ids: Sequence[int]) -> str:
    """The ledger's digest of a prompt and what was sampled after it."""
    return tokens_digest(pack_tokens(token_ids))


class Given:
    """The responses that an attempt was given: token ids by the conversation they end."""

    def __init__(self, *responses: tuple[int, ...]) -> None:
        self._responses = [
            ParentCall(position=CallPosition(attempt=0, ordinal=ordinal), token_ids=token_ids)
            for ordinal, token_ids in enumerate(responses)
        ]

    async def parents_by_tokens(self, rollout_id: str, attempt: int, cumulative_digest: str) -> list[ParentCall]:
        assert (rollout_id, attempt) == CALLER
        return [call for call in self._responses if digest_of(call.token_ids) == cumulative_digest]

    async def parents_by_conversation(self, rollout_id: str, attempt: int, key: str) -> list[ParentCall]:
        assert (rollout_id, attempt) == CALLER
        return self._responses if key == own_key(FIRST, ANSWER) else []


class Rule:
    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def new_segment_reason(self, body: dict) -> str | None:
        return self.reason


async def going_on(
    body: dict, given: Given, required: Sequence[int] | str | None = "unsaid", rule: str | None = None
) -> Continuation:
    named = {} if required == "unsaid" else {"required_prefix_token_ids": required}
    return await continuation({**body, **named}, CALLER, given, Rule(rule))


async def test_a_conversation_without_an_answer_is_a_root() -> None:
    for required in ("unsaid", None):
        assert await going_on(FIRST, Given((1, 2)), required) == Continuation("root", None, None, None)


async def test_a_known_answer_is_continued_with_its_exact_tokens() -> None:
    found = await going_on(SECOND, Given((1, 2, 3)))
    assert found == Continuation("append", None, CallPosition(attempt=0, ordinal=0), (1, 2, 3))


async def test_equal_tokens_are_one_parent_however_often_they_were_sampled() -> None:
    assert (await going_on(SECOND, Given((1, 2), (1, 2)))).continuity == "append"


async def test_different_tokens_behind_the_same_words_are_never_joined() -> None:
    found = await going_on(SECOND, Given((1, 2), (1, 3)))
    assert found == Continuation("new_segment", "parent_ambiguous", None, None)


async def test_an_unknown_answer_starts_a_segment() -> None:
    assert await going_on(SECOND, Given()) == Continuation("new_segment", "parent_unknown", None, None)


async def test_a_changed_history_starts_a_segment() -> None:
    other = {"messages": [{"role": "user", "content": "HELLO"}, *SECOND["messages"][1:]]}
    assert await going_on(other, Given((1, 2))) == Continuation("new_segment", "parent_unknown", None, None)


async def test_the_template_may_forbid_to_go_on_from_a_known_answer() -> None:
    found = await going_on(SECOND, Given((1, 2)), rule="rewritten")
    assert found == Continuation("new_segment", "rewritten", CallPosition(attempt=0, ordinal=0), None)


async def test_an_agent_that_names_the_tokens_goes_on_from_them() -> None:
    found = await going_on(SECOND, Given((5,), (1, 2)), required=[1, 2], rule="rewritten")
    assert found == Continuation("append", None, CallPosition(attempt=0, ordinal=1), [1, 2])


async def test_tokens_that_no_call_ended_with_are_used_but_not_joined() -> None:
    found = await going_on(SECOND, Given((1, 2)), required=[1, 2, 3])
    assert found == Continuation("new_segment", "required_prefix_unknown", None, [1, 2, 3])


async def test_an_agent_that_names_no_tokens_has_rewritten_its_history() -> None:
    found = await going_on(SECOND, Given((1, 2)), required=None)
    assert found == Continuation("new_segment", "history_rewritten", None, None)


@pytest.mark.parametrize("token_ids", [(), (0,), (1, 2**31 - 1)])
def test_the_digest_is_that_of_the_ledger(token_ids: tuple[int, ...]) -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in token_ids)
    assert digest_of(token_ids) == hashlib.sha256(packed).hexdigest()
