"""A vLLM server whose answers follow from request, seed and weights, and which can be caught in the middle of a step.

What the policy does follows from what it has sampled, so that rollouts of one prompt get different rewards.
"""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.failures.policy_server import PATIENCE_S, PolicyServer
from tests.gym.sampling_vllm import Drop
from tests.gym.stub_model import Message, Reply

MOST_TURNS = 4


def wavering(messages: list[Message]) -> Reply:
    """Uses the tool one to four times, as often as its first thought says."""
    thoughts = [message["reasoning"] for message in messages if message["role"] == "assistant"]
    if thoughts and len(thoughts) > int(thoughts[0].split()[-1], 16) % MOST_TURNS:
        return Reply("done", answer="done")
    return Reply("go on", "use", {"number": len(thoughts)})


@dataclass
class Caught:
    """Samplings that wait: all that come once `samples` more were asked of the weights `version`."""

    version: str
    samples: int
    lost: bool = False
    _reached: threading.Event = field(default_factory=threading.Event)
    _opened: threading.Event = field(default_factory=threading.Event)

    async def reached(self) -> None:
        """Wait until one waits."""
        assert await asyncio.to_thread(self._reached.wait, PATIENCE_S), f"{self.samples} samples of {self.version} left"

    def release(self, *, lost: bool = False) -> None:
        """Answer them; or, if they are `lost`, close their connections."""
        self.lost = lost
        self._opened.set()

    def wait(self) -> None:
        """One sampling."""
        self._reached.set()
        assert self._opened.wait(PATIENCE_S), "nobody released the samples"
        if self.lost:
            raise Drop


class FaultyServer(PolicyServer):
    """A server of seeded requests only."""

    _caught: Caught | None = None
    _starts = 0
    unseeded = 0

    def catches(self, version: int, samples: int) -> Caught:
        """Let that many more samplings pass, then keep all until they are released."""
        with self._changed:
            self._caught = Caught(f"policy-{version}", samples)
            return self._caught

    def restarts(self) -> None:
        """Another process: the weights, their label and every request are gone."""
        with self._changed:
            caught, self._caught = self._caught, None
            self.version, self._digest, self._loading, self._paused = "default", None, None, False
            self._starts += 1
        if caught is not None:
            caught.release(lost=True)

    def answer(self, method: str, path: str, body: dict[str, Any], gone: Any) -> dict[str, Any]:
        """One request."""
        if path.partition("?")[0] == "/collective_rpc":
            process = f"vllm-{self._starts}"
            return {"results": [{"process": process, "digest": self._digest, "problem": None}]}
        return super().answer(method, path, body, gone)

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        if not body["sampling_params"].get("allowed_token_ids"):
            self.unseeded += body["sampling_params"].get("seed") is None
            caught = self._passed()
            if caught is not None:
                caught.wait()
        return super()._generate(body)

    def _passed(self) -> Caught | None:
        with self._changed:
            caught = self._caught
            if caught is None or caught.version != self.version:
                return None
            caught.samples -= 1
            return caught if caught.samples < 0 else None
