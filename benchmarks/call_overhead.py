"""What the ledger costs a model call: the same calls with and without it, taking turns, on a real vLLM and PostgreSQL.

    .venvs/onbelay/bin/python -m benchmarks.call_overhead --json OUT [--calls 120] [--policy FOLDER]

Calls of 64 tokens after prompts of 300 to 500, as turns of conversations with the demo's policy: by vLLM's own chat
route, on exact tokens, and on exact tokens through the ledger as the model server does it (claim, find the parent,
generate, record). `durable_write` is the transaction that holds a response back until it cannot be lost; `ledger` is
all that the ledger adds to a call: claim, find the parent, durable write.
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import SecretStr

from activities.generation.refit import refit
from activities.generation.vllm import VllmServer
from activities.generation.weights import weights_digest
from benchmarks import ending
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from workers.demo.policy import make_policy
from workers.gym.policy_model.caller import Caller
from workers.gym.policy_model.continuity import continuation
from workers.gym.policy_model.errors import GenerationUnavailable, failure_of
from workers.gym.policy_model.exact import Completion, ExactClient
from workers.gym.policy_model.fingerprint import fingerprint
from workers.gym.policy_model.recordable import recordable
from workers.gym.policy_model.template import Template
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef

Body = dict[str, Any]
Measured = TypeVar("Measured")

TURNS = 3  # of one conversation; its prompts grow from about 300 to 500 tokens
GENERATED_TOKENS = 64
OPENING = "Open Ada safe of 3 parts and 9 turns." * 30
GO_ON = "Open Grace safe of 3 parts and 9 turns."
LEDGER_PARTS = ("claim", "find_parent", "durable_write")
WARM_UP_CALLS = 2 * TURNS
LIMIT_P50_MS = 3.0
LIMIT_SHARE = 0.05
TIMEOUT_S = 300.0


class HttpEndpoint:
    """A vLLM server over HTTP, with kept connections as NeMo-Gym's client has them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str) -> Body:
        """The answer's JSON."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Body) -> Body:
        """The answer's JSON."""
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Body | None) -> Body:
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise GenerationUnavailable(repr(error)) from error
        if answer.status_code != httpx.codes.OK:
            raise failure_of(answer.status_code, answer.content, path)
        return answer.json()


class Stopwatch:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, list[float]] = defaultdict(list)

    async def time(self, name: str, work: Awaitable[Measured]) -> Measured:
        """Await, and note how long it took."""
        started = time.perf_counter()
        result = await work
        self.ms[name].append((time.perf_counter() - started) * 1e3)
        return result

    def forget(self, calls: int) -> None:
        """Leave out the first calls, which fill caches and pools."""
        for name, values in self.ms.items():
            self.ms[name] = values[calls:]


@dataclass(frozen=True)
class Bench:
    """The two servers and what talks to them."""

    endpoint: HttpEndpoint
    template: Template
    exact: ExactClient
    ledger: Ledger
    watch: Stopwatch
    prompt_tokens: list[int]

    async def conversation(self, rollout_id: str, number: int) -> None:
        """Some turns; every call is made in all three ways, in changing order."""
        caller = Caller(rollout_id, 0)
        messages: list[Body] = [{"role": "user", "content": f"{number % 10}{OPENING}"}]
        prefix: list[int] | None = None
        for turn in range(TURNS):
            body = request(messages)
            ways: list[Callable[[], Awaitable[Any]]] = [
                lambda body=body: self.watch.time("chat", self._chat(body)),
                lambda body=body, prefix=prefix: self.watch.time("exact", self.exact.complete(body, prefix)),
                lambda body=body: self.watch.time("recorded", self._recorded(caller, body)),
            ]
            first = (number * TURNS + turn) % len(ways)
            results = {at % len(ways): await ways[at % len(ways)]() for at in range(first, first + len(ways))}
            completion: Completion = results[2]
            self.prompt_tokens.append(len(completion.prompt_token_ids))
            prefix = [*completion.prompt_token_ids, *completion.sampled_token_ids]
            messages += [completion.response["choices"][0]["message"], {"role": "user", "content": GO_ON}]

    async def _chat(self, body: Body) -> Body:
        wanted = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return await self.endpoint.post("/v1/chat/completions", body | wanted)

    async def _recorded(self, caller: Caller, body: Body) -> Completion:
        """As the model server does it for a call that is in no earlier attempt."""
        calls = self.ledger.calls
        lease = await self.watch.time("claim", calls.claim(*caller, fingerprint(body, self.template.contract)))
        started_at = datetime.now(UTC)
        going_on = await self.watch.time("find_parent", continuation(body, caller, calls, self.template))
        completion = await self.exact.complete(body, going_on.prefix)
        response = recordable(body, going_on, completion, started_at)
        await self.watch.time("durable_write", calls.record(lease, response))
        self.watch.ms["ledger"].append(sum(self.watch.ms[part][-1] for part in LEDGER_PARTS))
        return completion


def request(messages: list[Body]) -> Body:
    """A call of exactly `GENERATED_TOKENS` tokens."""
    sampling = {"max_tokens": GENERATED_TOKENS, "min_tokens": GENERATED_TOKENS, "temperature": 1.0}
    return {"model": "policy", "messages": list(messages), "ignore_eos": True, **sampling}


@asynccontextmanager
async def serving(folder: Path, policy: Path) -> AsyncIterator[Bench]:
    """PostgreSQL and vLLM under `folder`, the policy as version 0."""
    async with AsyncExitStack() as stack:
        postgres = EmbeddedPostgres(folder / "postgres", free_port())
        stack.callback(postgres.delete)
        await stack.enter_async_context(running(postgres.service(), folder / "postgres.log"))
        config = StorageConfig(dsn=SecretStr(postgres.dsn), blobs_url=str(folder / "blobs"))
        await migrate(config)
        database = Database(config)
        stack.push_async_callback(database.close)
        url = await stack.enter_async_context(vllm(folder, policy))
        async with VllmServer(url, refit_timeout_s=TIMEOUT_S) as server:
            await refit([server], WeightsRef(version=0, path=str(policy), digest=weights_digest(policy)), "wait")
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S))
        endpoint = HttpEndpoint(client)
        template = await Template.check(endpoint)
        ledger = Ledger(database, BlobStore(config.blobs_url))
        yield Bench(endpoint, template, ExactClient(endpoint, template), ledger, Stopwatch(), [])


@asynccontextmanager
async def vllm(folder: Path, policy: Path) -> AsyncIterator[str]:
    """The server with the demo's settings; its address."""
    embedded = {"port": free_port(), "max_model_len": 1024, "tool_call_parser": "hermes"}
    recipe = Recipe.model_validate(
        {
            "run": {"model": str(policy), "dataset": "unused"},
            "generation": {"embedded": embedded | {"reasoning_parser": "deepseek_r1"}},
        }
    )
    server = EmbeddedVllm(recipe)
    async with running(server.service(), folder / "vllm.log"):
        yield server.url


async def measure(policy: Path, calls: int) -> Body:
    """All calls, one after the other."""
    conversations = math.ceil((calls + WARM_UP_CALLS) / TURNS)
    with tempfile.TemporaryDirectory(prefix="onbelay-benchmark-") as temporary:
        async with serving(Path(temporary), policy) as bench:
            await bench.ledger.runs.create("benchmark", "benchmark", {}, "d" * 64, 1, "m" * 64)
            group = "benchmark/step-0/group-0"
            await bench.ledger.groups.open(group, "benchmark", 0, 0, "train", "prompt", 0, conversations)
            for number in range(conversations):
                rollout_id = f"{group}/rollout-{number}"
                await bench.ledger.rollouts.begin_attempt(
                    rollout_id, "benchmark", recovery="replay", policy_version=0, max_replay_age_versions=0
                )
                await bench.conversation(rollout_id, number)
            violations = await bench.ledger.checks.of("benchmark")
    assert not violations, violations
    bench.watch.forget(WARM_UP_CALLS)
    return report(bench.watch.ms, bench.prompt_tokens)


def report(ms: dict[str, list[float]], prompt_tokens: list[int]) -> Body:
    """Medians and 99th percentiles in milliseconds, and shares of a call without the ledger."""
    quantiles = {
        name: {"p50": round(statistics.median(values), 3), "p99": round(statistics.quantiles(values, n=100)[98], 3)}
        for name, values in sorted(ms.items())
    }
    write, share = quantiles["durable_write"]["p50"], quantiles["ledger"]["p50"] / quantiles["exact"]["p50"]
    return {
        "calls": len(ms["exact"]),
        "prompt_tokens": {"min": min(prompt_tokens), "max": max(prompt_tokens)},
        "generated_tokens": GENERATED_TOKENS,
        "milliseconds": quantiles,
        "ledger_share_of_call": round(share, 5),
        "limits": {"durable_write_p50_ms": LIMIT_P50_MS, "share_of_call": LIMIT_SHARE},
        "within_limits": write < LIMIT_P50_MS and share < LIMIT_SHARE,
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--calls", type=int, default=120, help="calls of each kind")
    parser.add_argument("--policy", type=Path, default=Path(".onbelay/demo/policy"), help="folder of the demo's policy")
    arguments = parser.parse_args()
    make_policy(arguments.policy, print)
    result = ending.run(measure(arguments.policy, arguments.calls))
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    for name, values in result["milliseconds"].items():
        print(f"{name:14s} p50 {values['p50']:8.2f} ms   p99 {values['p99']:8.2f} ms")
    share = result["ledger_share_of_call"]
    print(f"the ledger adds {share:.2%} to a call of {GENERATED_TOKENS} tokens on exact tokens")


if __name__ == "__main__":
    main()
