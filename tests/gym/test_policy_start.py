"""A recording policy model serves only when its ledger, its endpoints and the served chat template are fit for it."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gym.byte_language import rendered
from tests.gym.forks import Forks
from tests.gym.launcher import START_TIMEOUT_S, Launcher, write_recipe
from tests.gym.policies import splitting
from tests.gym.ports import reserved_port
from tests.gym.recording_servers import SERVERS, sections, server
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Message

pytestmark = pytest.mark.integration

MODEL = {"model": SERVERS["model"]}


def counting(messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
    """A chat template that begins with the number of messages, so that every turn changes the whole prompt."""
    return f"{len(messages)}\n{rendered(messages, tools, generation_prompt)}"


def test_settings_that_would_leave_nothing_to_record_are_named(
    refusal: Callable[..., str], storage: dict[str, Any]
) -> None:
    settings = {"use_completions_api": True, "is_responses_native": True, "endpoint_file": "file"}
    servers = {
        f"with_{key}": server("responses_api_models", "workers.gym.policy_model.app", **{key: value})
        for key, value in settings.items()
    }
    output = refusal(*sections("http://127.0.0.1:9", storage, servers))
    for key in settings:
        assert f"gym.servers.with_{key}.config is not valid for PolicyModel: : Value error, {key} is not" in output


def test_a_chat_template_that_rewrites_history_is_refused_with_its_fault(
    refusal: Callable[..., str], storage: dict[str, Any]
) -> None:
    with SamplingVllm(splitting, render=counting) as vllm:
        output = refusal(*sections(vllm.url, storage, MODEL))
    assert "gym.servers.model cannot serve the policy of its endpoints" in output
    assert "The chat template rewrites earlier turns when a tool answers" in output


def test_endpoints_that_serve_different_templates_are_refused(
    refusal: Callable[..., str], storage: dict[str, Any]
) -> None:
    def shouting(messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        return rendered(messages, tools, generation_prompt).replace("user\n", "USER\n")

    with SamplingVllm(splitting) as one, SamplingVllm(splitting, render=shouting) as other:
        gym, generation, _ = sections(one.url, storage, MODEL)
        generation["endpoints"] = [one.url, other.url]
        output = refusal(gym, generation, storage)
    assert "serve different models, tokenizers or chat templates" in output


def test_servers_wait_for_vllm_and_are_ready_after_it(forks: Forks, tmp_path: Path, storage: dict[str, Any]) -> None:
    with reserved_port() as port:
        recipe = write_recipe(tmp_path, *sections(f"http://127.0.0.1:{port}", storage, MODEL))
        with socket.create_server(("127.0.0.1", port)) as early:
            early.settimeout(START_TIMEOUT_S)
            launcher = Launcher(recipe, forks)
            early.accept()[0].close()  # vLLM is asked, and is not there
        try:
            with SamplingVllm(splitting, port=port) as vllm:
                launcher.wait_until_ready()
                assert vllm.requests
        finally:
            launcher.kill()
