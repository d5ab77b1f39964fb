"""The served chat template's rule for going on. Checked on the server before the first call, never assumed.

1. A turn ends with one token at which the served model stops. A template without one is refused.
2. What follows a turn depends on the messages after it alone: the delta of a stub equals that of the whole
   conversation, with and without tools. A template for which that does not hold is refused.
3. Earlier turns must stay as they are when a tool answers. A template that rewrites them then is refused.
4. Many templates drop the thoughts of earlier turns when a *user* speaks again. The tool loop of one user turn is exact
   with them; a new user turn starts a new segment (`template_rewrites_user_turn`), rendered as the template wants it.
   So a turn that its template would show differently by then is never an earlier turn of a segment.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from workers.gym.policy_model import canned
from workers.gym.policy_model.conversation import last_assistant
from workers.gym.policy_model.delta import Deltas
from workers.gym.policy_model.endpoint import GENERATE, RENDER, Endpoint
from workers.gym.policy_model.errors import ContextOverflow, ContinuityBroken, GenerationRefused, TemplateUnfit

Body = dict[str, Any]

REWRITES_USER_TURN = "template_rewrites_user_turn"


@dataclass(frozen=True)
class Template:
    """`contract`: a digest of the served model's name and of what its tokenizer and template make of known messages."""

    end_of_turn: int
    rewrites_user_turn: bool
    contract: str
    heads: dict[str, int] = field(default_factory=dict[str, int], compare=False, repr=False)  # see Deltas

    @classmethod
    async def check(cls, endpoint: Endpoint) -> "Template":
        """Ask the server. Raises TemplateUnfit naming the fault, or a `ModelCallFailed` while the server is away."""
        checker = _Checker(endpoint, (await endpoint.get("/v1/models"))["data"][0]["id"])
        try:
            return await checker.template()
        except (GenerationRefused, ContextOverflow) as error:
            raise TemplateUnfit(f"The chat template fails at an ordinary conversation: {error}") from error

    def new_segment_reason(self, body: Body) -> str | None:
        """Why a request whose parent is known must not continue its tokens; None where it may."""
        last = last_assistant(body)
        new = body["messages"] if last is None else body["messages"][last + 1 :]
        spoken = any(message["role"] != "tool" for message in new)
        return REWRITES_USER_TURN if self.rewrites_user_turn and spoken else None


class _Checker:
    """One check of one server."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model
        self._rendered: dict[str, list[int]] = {}

    async def template(self) -> Template:
        end_of_turn = await self._end_of_turn()
        turns = [Turn(conversation, tools) for tools in (canned.TOOLS, None) for conversation in canned.TURNS]
        turns = [turn for turn in turns if await self._is_rendered(turn)]
        rewriting = [turn for turn in turns if await self._rewrites(turn, end_of_turn)]
        for turn in rewriting:
            if turn.role == "tool":
                raise TemplateUnfit(
                    "The chat template rewrites earlier turns when a tool answers, so every turn would be a segment of "
                    "its own. Serve the model with a template that keeps the turns of a tool loop as they were."
                )
        deltas = Deltas(self._endpoint, end_of_turn, {})
        for turn in turns:
            if turn.role == "tool" or not rewriting:
                await self._check_delta(turn, deltas, end_of_turn)
        identity = json.dumps([self._model, end_of_turn, list(self._rendered.values())], separators=(",", ":"))
        return Template(end_of_turn, bool(rewriting), hashlib.sha256(identity.encode()).hexdigest())

    async def _end_of_turn(self) -> int:
        """The token that the template puts after an assistant's text, whatever the text is."""
        one, two = [await self._render(canned.answered(text), None, prompt=False) for text in ("1", "2")]
        if one == two:
            raise TemplateUnfit("The chat template leaves out what the assistant says: two answers look equal.")
        ending = 0
        while one[len(one) - 1 - ending] == two[len(two) - 1 - ending]:
            ending += 1
        if ending == 0:
            raise TemplateUnfit(
                "The chat template has no end-of-turn token: nothing follows the text of an assistant turn, the next "
                "header is what ends it. Serve the model with a template that ends every turn with a token of its own."
            )
        candidates = one[len(one) - ending :]
        for token in candidates:
            if await self._stops_at(token, one):
                return token
        raise TemplateUnfit(
            f"The chat template ends an assistant turn with the tokens {candidates}, but the served model stops at "
            "none of them: its own end-of-turn token is another. Put the template's among eos_token_id of its "
            "generation_config.json."
        )

    async def _stops_at(self, token: int, prompt: list[int]) -> bool:
        """Let the model say the token, and see whether the server stops there."""
        sampling = {"allowed_token_ids": [token], "max_tokens": 2, "temperature": 1.0}
        request = {"model": self._model, "token_ids": prompt, "sampling_params": sampling}
        choice = (await self._endpoint.post(GENERATE, request))["choices"][0]
        return choice["finish_reason"] == "stop" and choice["token_ids"] == [token]

    async def _is_rendered(self, turn: "Turn") -> bool:
        """Some templates know no tools, or no system prompt; the server will refuse the agents' requests too."""
        try:
            await self._render(turn.whole, turn.tools, prompt=True)
        except GenerationRefused:
            return False
        return True

    async def _rewrites(self, turn: "Turn", end_of_turn: int) -> bool:
        """Whether the new messages change the tokens up to the end of the newest assistant turn."""
        before = _until_last(await self._render(turn.before, turn.tools, prompt=False), end_of_turn)
        return (await self._render(turn.whole, turn.tools, prompt=True))[: len(before)] != before

    async def _check_delta(self, turn: "Turn", deltas: Deltas, end_of_turn: int) -> None:
        """The stub's delta is the conversation's."""
        before = _until_last(await self._render(turn.before, turn.tools, prompt=False), end_of_turn)
        whole = await self._render(turn.whole, turn.tools, prompt=True)
        try:
            delta = (await deltas.render(self._body(turn.whole, turn.tools), turn.last)).token_ids
        except ContinuityBroken as error:
            raise TemplateUnfit(f"The chat template's {turn.role} turn differs: {error}") from error
        if whole[len(before) :] != delta:
            raise TemplateUnfit(
                f"The chat template's {turn.role} turn differs with what was said before it: "
                f"{len(whole) - len(before)} tokens follow the whole conversation, {len(delta)} other tokens follow "
                "the assistant's turn alone. Serve the model with a template that renders each message on its own."
            )

    async def _render(self, messages: list[Body], tools: list[Body] | None, *, prompt: bool) -> list[int]:
        body = self._body(messages, tools) | {"add_generation_prompt": prompt}
        key = json.dumps(body)
        if key not in self._rendered:
            self._rendered[key] = (await self._endpoint.post(RENDER, body))["token_ids"]
        return self._rendered[key]

    def _body(self, messages: list[Body], tools: list[Body] | None) -> Body:
        return {"model": self._model, "messages": messages} | ({"tools": tools} if tools else {})


@dataclass(frozen=True)
class Turn:
    """A conversation with the messages that arrive after its newest assistant turn."""

    whole: list[Body]
    tools: list[Body] | None

    @property
    def last(self) -> int:
        """Where the newest assistant turn stands."""
        return max(at for at, message in enumerate(self.whole) if message["role"] == "assistant")

    @property
    def before(self) -> list[Body]:
        """Up to and with that turn."""
        return self.whole[: self.last + 1]

    @property
    def role(self) -> str:
        """Who speaks last."""
        return self.whole[-1]["role"]


def _until_last(token_ids: list[int], end_of_turn: int) -> list[int]:
    """Up to and with the last end-of-turn token."""
    if end_of_turn not in token_ids:
        raise TemplateUnfit(
            f"The chat template ends an answer with token {end_of_turn}, but not a turn that calls a tool: that turn's "
            "end cannot be told. Serve the model with a template that ends every turn with the same token."
        )
    return token_ids[: len(token_ids) - token_ids[::-1].index(end_of_turn)]
