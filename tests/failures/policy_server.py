"""The sampling fake with the weights that a rollout worker asks for, and faults that hit one conversation only.

Rollouts of a group sample side by side: a fault is met by the first conversation that comes to a call, then by nobody
else. Conversations are told apart by what they sampled.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gym.byte_language import decode
from tests.gym.sampling_vllm import Gone, Refuse, SamplingVllm
from tests.gym.stub_model import Message, Policy, Reply

TOOL_TURNS = 4
CALLS = TOOL_TURNS + 1  # of an undisturbed rollout
GYM_TRIES = 3  # of one call, where vLLM answers 5xx or 429
PATIENCE_S = 180.0
TOO_LONG = "The decoder prompt (length 99999) is longer than the maximum model length of 16384."

Fault = Callable[[], Reply | None]


def refusing(status: int, message: str = "out of order") -> Fault:
    """vLLM answers with a status."""

    def fault() -> Reply | None:
        raise Refuse(status, message)

    return fault


class Hold:
    """A call that vLLM answers once it is released; `unanswered`, with an error then."""

    def __init__(self, *, unanswered: bool = True) -> None:
        self._unanswered = unanswered
        self._reached = threading.Event()
        self._released = threading.Event()

    def __call__(self) -> Reply | None:
        """As a fault."""
        self._reached.set()
        assert self._released.wait(PATIENCE_S), "nobody released the call"
        if self._unanswered:
            raise Refuse(500, "nobody waits for this answer")
        return None

    async def reached(self) -> None:
        """Wait until the call is with vLLM."""
        assert await asyncio.to_thread(self._reached.wait, PATIENCE_S), "no conversation came to the call"

    def release(self) -> None:
        """Go on."""
        self._released.set()


@dataclass
class _Armed:
    fault: Fault
    times: int | None
    met_by: str | None = None


@dataclass
class Episode:
    """The scripted policy: a tool in every turn, then an answer. `say` changes what a call says, for everybody.

    Only conversations that hold `marker` meet faults: whatever an earlier test left behind takes none of them.
    """

    marker: str = ""
    say: Callable[[int], Reply | None] = lambda number: None
    _armed: dict[int, _Armed] = field(default_factory=dict[int, _Armed])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def breaks(self, call: int, fault: Fault, times: int | None = GYM_TRIES) -> None:
        """From now on, the first conversation that comes to this call (from 0) meets a fault; None: each time."""
        with self._lock:
            self._armed[call] = _Armed(fault, times)

    def holds(self, call: int, *, unanswered: bool = True, times: int = 1) -> Hold:
        """The first conversation that comes to this call waits."""
        hold = Hold(unanswered=unanswered)
        self.breaks(call, hold, times)
        return hold

    def __call__(self, messages: list[Message]) -> Reply:
        """The reply to a conversation."""
        number = sum(message["role"] == "tool" for message in messages)
        ours = any(self.marker in (message["content"] or "") for message in messages)
        fault = self._fault(number, "".join(message.get("reasoning") or "" for message in messages)) if ours else None
        ordinary = Reply("done", answer="done") if number == TOOL_TURNS else Reply("go on", "use", {"number": number})
        return (fault() if fault is not None else None) or self.say(number) or ordinary

    def _fault(self, number: int, conversation: str) -> Fault | None:
        with self._lock:
            armed = self._armed.get(number)
            if armed is None or armed.times == 0 or armed.met_by not in (None, conversation):
                return None
            armed.met_by = conversation
            armed.times = None if armed.times is None else armed.times - 1
            return armed.fault


class PolicyServer(SamplingVllm):
    """A vLLM server that is fitted with policy weights."""

    episode: Episode
    _answers = threading.local()  # of the thread that makes one
    _digest = "d" * 64
    _loading: str | None = None
    _paused = False

    def start_over(self) -> None:
        """An undisturbed policy of version 0."""
        self.version = "policy-0"
        self._digest, self._loading, self._paused = "d" * 64, None, False
        self.generations.clear()
        self.episode = Episode()
        self.policy: Policy = self.episode

    @property
    def samples(self) -> int:
        """How often the marked conversations were sampled from."""
        return sum(self.episode.marker in decode(one.prompt_token_ids) for one in self.generations)

    def distorts(self, distort: Callable[[dict[str, Any]], None]) -> None:
        """As a part of a fault: change the answer to the call that meets it."""
        self._answers.distort = distort

    def answer(self, method: str, path: str, body: dict[str, Any], gone: Gone) -> dict[str, Any]:
        """One request."""
        match path.partition("?")[0]:
            case "/collective_rpc":
                return {"results": [{"process": "vllm", "digest": self._digest, "problem": None}]}
            case "/is_paused":
                return {"is_paused": self._paused}
            case "/pause" | "/resume" as asked:
                self._paused = asked == "/pause"
                return {}
            case "/update_weights":
                self._loading = body["update_info"]["digest"]
                return {}
            case "/finish_weight_update":
                assert self._loading is not None, "there is nothing to finish"
                self.version, self._digest, self._loading = body["weight_version"], self._loading, None
                return {}
            case "/init_weight_transfer_engine" | "/start_weight_update" | "/reset_prefix_cache":
                return {}
        self._answers.distort = None
        answer = super().answer(method, path, body, gone)
        if self._answers.distort is not None:
            self._answers.distort(answer)
        return answer
