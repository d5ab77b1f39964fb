"""What a refit costs the requests that meet it: a real vLLM, requests in flight, a refit in each of the pause modes.

    .venvs/onbelay/bin/python -m benchmarks.refit --json OUT [--repeats 5] [--streams 4] [--policy FOLDER]

`gap` is the time between two tokens of a stream. The longest gap around a refit stands against the median gap before
it, in the same streams. With `abort`, a request is sent again as soon as it is ended, as a rollout does, and the gap is
until its first new token. `new_request_s` is what a request waits for its first token that is sent while the server is
paused; `first_token_s` the same without a refit. `phases` are the refit's own. Nothing here passes or fails.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from activities.generation.refit import refit
from activities.generation.vllm import PauseMode, VllmServer
from activities.generation.weights import weights_digest
from benchmarks import ending
from benchmarks.larger_policy import write_larger_policy
from configs.recipe import Recipe
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef

MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")
CONTEXT_TOKENS = 1024
PROMPT = list(range(10, 34))
TOKENS = CONTEXT_TOKENS - len(PROMPT) - 1
BEFORE = 64  # tokens of every stream before the refit
MOST_TRIES = 5
BURST_S = 2e-4  # tokens that are read at once have waited for their reader: one arrival
TIMEOUT_S = 300.0


class NotMet(Exception):
    """A stream had ended before the refit paused the server, or nobody saw it paused: the attempt does not count."""


@dataclass
class Stream:
    """One request: when its tokens arrived (seconds of the clock), and how it ended."""

    arrived: list[float] = field(default_factory=list[float])
    tokens: int = 0
    finish_reason: str | None = None
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: httpx.AsyncClient, tokens: int) -> None:
        """Read the stream to its end."""
        sampling = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling, "stream": True}
        async with client.stream("POST", "/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        self._read(choice)
        self.enough.set()

    def _read(self, choice: dict[str, Any]) -> None:
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        if choice["token_ids"]:
            self.tokens += len(choice["token_ids"])
            now = time.perf_counter()
            if not self.arrived or now - self.arrived[-1] > BURST_S:
                self.arrived.append(now)
        if self.tokens >= BEFORE:
            self.enough.set()

    def gaps(self, until: float) -> list[float]:
        """Seconds between tokens that arrived before a time."""
        return [b - a for a, b in zip(self.arrived, self.arrived[1:], strict=False) if b <= until]


@dataclass(frozen=True)
class Observed:
    """One refit, in seconds."""

    median_gap_s: float
    longest_gap_s: float
    first_token_s: float
    new_request_s: float
    refit_s: float
    phases: dict[str, float]


class Bench:
    """One server, whose weights are the policy's under changing versions."""

    def __init__(self, server: VllmServer, client: httpx.AsyncClient, weights: WeightsRef, streams: int) -> None:
        self._server = server
        self._client = client
        self._weights = weights
        self._streams = streams

    async def observe(self, mode: PauseMode) -> Observed:
        """A refit that met every stream under way."""
        reason = ""
        for _ in range(MOST_TRIES):
            try:
                return await self._attempt(mode)
            except NotMet as error:
                reason = str(error)
        raise SystemExit(f"{MOST_TRIES} times no refit with mode {mode} could be observed; at last {reason}.")

    async def next_version(self, mode: PauseMode = "wait") -> tuple[float, dict[str, float]]:
        """The same weights under the next version, loaded like any others; seconds, and those of its parts."""
        self._weights = self._weights.model_copy(update={"version": self._weights.version + 1})
        started = time.perf_counter()
        done = await refit([self._server], self._weights, mode)
        return time.perf_counter() - started, asdict(done.phases)

    async def _attempt(self, mode: PauseMode) -> Observed:
        first_token_s = await self._first_token()
        streams = [Stream() for _ in range(self._streams)]
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(self._client, TOKENS))
            for stream in streams:
                await stream.enough.wait()
            began = time.perf_counter()
            refitting = tasks.create_task(self.next_version(mode))
            arriving = tasks.create_task(self._arriving(refitting))
            again = tasks.create_task(self._again(streams)) if mode == "abort" else None
            refit_s, phases = await refitting
            ended = time.perf_counter()
        before = [gap for stream in streams for gap in stream.gaps(began)]
        found = [await again] if again else [self._longest(stream, began, ended, mode) for stream in streams]
        new_request_s = arriving.result()
        longest = [gap for gap in found if gap is not None]
        if len(longest) < len(found):
            raise NotMet(f"a stream of {TOKENS} tokens had ended before it (use a larger policy)")
        if new_request_s is None:
            raise NotMet("it was over before the server said that it is paused")
        return Observed(statistics.median(before), max(longest), first_token_s, new_request_s, refit_s, phases)

    def _longest(self, stream: Stream, began: float, ended: float, mode: PauseMode) -> float | None:
        """The longest gap that ended after the refit began; with `keep` tokens must have come after it as well."""
        after = [b - a for a, b in zip(stream.arrived, stream.arrived[1:], strict=False) if b > began]
        if not after or (mode == "keep" and stream.arrived[-1] < ended):
            return None
        return max(after)

    async def _again(self, streams: list[Stream]) -> float | None:
        """Send each request again when it was ended; the most seconds from a last token to a first new one."""

        async def follow(stream: Stream) -> float | None:
            while stream.finish_reason is None:
                await asyncio.sleep(0.0005)
            if stream.finish_reason != "abort":
                return None
            retry = Stream()
            await retry.run(self._client, 1)
            return retry.arrived[0] - stream.arrived[-1]

        gaps = await asyncio.gather(*(follow(stream) for stream in streams))
        known = [gap for gap in gaps if gap is not None]
        return max(known) if len(known) == len(gaps) else None

    async def _arriving(self, refitting: asyncio.Task[Any]) -> float | None:
        """Send a request as soon as the server says that it is paused; None if it never did."""
        while not await self._server.is_paused():
            if refitting.done():
                return None
        return await self._first_token()

    async def _first_token(self) -> float:
        stream, sent = Stream(), time.perf_counter()
        await stream.run(self._client, 1)
        return stream.arrived[0] - sent


@asynccontextmanager
async def serving(folder: Path, policy: Path, streams: int) -> AsyncIterator[Bench]:
    """vLLM with the policy, version 0 loaded."""
    embedded = {"port": free_port(), "max_model_len": CONTEXT_TOKENS}
    recipe = Recipe.model_validate(
        {"run": {"model": str(policy), "dataset": "unused"}, "generation": {"embedded": embedded}}
    )
    vllm = EmbeddedVllm(recipe)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running(vllm.service(), folder / "vllm.log"),
        VllmServer(vllm.url, refit_timeout_s=TIMEOUT_S) as server,
        httpx.AsyncClient(base_url=vllm.url, timeout=TIMEOUT_S, limits=limits) as client,
    ):
        weights = WeightsRef(version=-1, path=str(policy), digest=weights_digest(policy))
        bench = Bench(server, client, weights, streams)
        await bench.next_version()
        yield bench


async def measure(policy: Path, repeats: int, streams: int) -> dict[str, Any]:
    """All modes, taking turns; the first round fills caches and does not count."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), policy, streams) as bench:
            observed: dict[PauseMode, list[Observed]] = {mode: [] for mode in MODES}
            for round_ in range(repeats + 1):
                for mode in MODES:
                    one = await bench.observe(mode)
                    if round_:
                        observed[mode].append(one)
    return {
        "streams": streams,
        "repeats": repeats,
        "context_tokens": CONTEXT_TOKENS,
        "weights_bytes": sum(path.stat().st_size for path in policy.glob("*.safetensors")),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "modes": {mode: summary(found) for mode, found in observed.items()},
    }


def summary(observed: list[Observed]) -> dict[str, Any]:
    """Medians over the repeats, and all that was observed."""

    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in observed)

    names = ("median_gap_s", "longest_gap_s", "first_token_s", "new_request_s", "refit_s")
    return {
        **{name: median(name) for name in names},
        "longest_to_median_gap": statistics.median(one.longest_gap_s / one.median_gap_s for one in observed),
        "phases": {part: statistics.median(one.phases[part] for one in observed) for part in observed[0].phases},
        "observed": [asdict(one) for one in observed],
    }


def table(results: dict[str, Any]) -> str:
    """The medians, in milliseconds."""
    head = f"{'mode':6}{'gap':>8}{'longest':>9}{'ratio':>8}{'first':>8}{'new':>9}{'refit':>9}"
    parts = ("check", "pause", "load", "confirm", "resume")
    lines = [head + "".join(f"{part:>9}" for part in parts)]
    for mode, one in results["modes"].items():
        numbers = [one["longest_gap_s"], one["longest_to_median_gap"], one["first_token_s"], one["new_request_s"]]
        lines.append(
            f"{mode:6}{one['median_gap_s'] * 1e3:8.2f}{numbers[0] * 1e3:9.1f}{numbers[1]:8.1f}{numbers[2] * 1e3:8.1f}"
            f"{numbers[3] * 1e3:9.1f}{one['refit_s'] * 1e3:9.1f}"
            + "".join(f"{one['phases'][part] * 1e3:9.1f}" for part in parts)
        )
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refit")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--repeats", type=int, default=5, help="refits of each mode")
    parser.add_argument("--streams", type=int, default=4, help="requests in flight")
    parser.add_argument("--policy", type=Path, help="model folder; without it a policy of ten million parameters")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = arguments.policy
        if policy is None:
            policy = Path(folder) / "policy"
            write_larger_policy(policy)
        results = ending.run(measure(policy.resolve(), arguments.repeats, arguments.streams))
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{arguments.streams} streams, medians of {arguments.repeats} refits, milliseconds:")
    print(table(results))


if __name__ == "__main__":
    main()
