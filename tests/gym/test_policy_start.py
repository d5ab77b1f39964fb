"""A recording policy model serves only when its ledger, its endpoints and the served chat template are fit for it."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gym.byte_language import rendered
from tests.gym.launcher import Launcher
from tests.gym.policies import splitting
from tests.gym.recording_servers import SERVERS, sections, server
from tests.gym.sampling_vllm import SamplingVllm
from tests.gym.stub_model import Message

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 120
MODEL = {"model": SERVERS["model"]}


def refused(recipe: Path) -> str:
    """What the launcher says when it does not start."""
    launcher = Launcher(recipe)
    output, _ = launcher.process.communicate(timeout=START_TIMEOUT_S)
    assert launcher.process.returncode == 1
    assert "Traceback" not in output
    assert "ready" not in output.splitlines()
    return output


def counting(messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
    """A chat template that begins with the number of messages, so that every turn changes the whole prompt."""
    return f"{len(messages)}\n{rendered(messages, tools, generation_prompt)}"


def test_settings_that_would_leave_nothing_to_record_are_named(
    recipe_file: Callable[..., Path], storage: dict[str, Any]
) -> None:
    settings = {"use_completions_api": True, "is_responses_native": True, "endpoint_file": "file"}
    servers = {
        f"with_{key}": server("responses_api_models", "workers.gym.policy_model.app", **{key: value})
        for key, value in settings.items()
    }
    output = refused(recipe_file(*sections("http://127.0.0.1:9", storage, servers)))
    for key in settings:
        assert f"gym.servers.with_{key}.config is not valid for PolicyModel: : Value error, {key} is not" in output


def test_a_chat_template_that_rewrites_history_is_refused_with_its_fault(
    recipe_file: Callable[..., Path], storage: dict[str, Any]
) -> None:
    with SamplingVllm(splitting, render=counting) as vllm:
        output = refused(recipe_file(*sections(vllm.url, storage, MODEL)))
    assert "gym.servers.model cannot serve the policy of its endpoints" in output
    assert "The chat template rewrites earlier turns when a tool answers" in output


def test_endpoints_that_serve_different_templates_are_refused(
    recipe_file: Callable[..., Path], storage: dict[str, Any]
) -> None:
    def shouting(messages: list[Message], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        return rendered(messages, tools, generation_prompt).replace("user\n", "USER\n")

    with SamplingVllm(splitting) as one, SamplingVllm(splitting, render=shouting) as other:
        gym, generation, _ = sections(one.url, storage, MODEL)
        generation["endpoints"] = [one.url, other.url]
        output = refused(recipe_file(gym, generation, storage))
    assert "serve different models, tokenizers or chat templates" in output


def test_servers_wait_for_vllm_and_are_ready_after_it(
    recipe_file: Callable[..., Path], storage: dict[str, Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as early:
        early.settimeout(START_TIMEOUT_S)
        port = early.getsockname()[1]
        launcher = Launcher(recipe_file(*sections(f"http://127.0.0.1:{port}", storage, MODEL)))
        early.accept()[0].close()  # vLLM is asked, and is not there
    try:
        with SamplingVllm(splitting, port=port) as vllm:
            launcher.wait_until_ready()
            assert vllm.requests
    finally:
        launcher.kill()
