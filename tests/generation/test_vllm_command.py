"""The command line of the embedded server."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.recipe import Recipe
from workers.stack.vllm_command import vllm_command


def recipe(**embedded: Any) -> Recipe:
    return Recipe.model_validate(
        {"run": {"model": "model", "dataset": "rows.jsonl"}, "generation": {"embedded": {"port": 8000, **embedded}}}
    )


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def test_settings_reach_the_command_and_its_environment() -> None:
    argv, env = vllm_command(recipe(dtype="bfloat16", max_model_len=512, kv_cache_gib=3, threads=2), Path("/v/python"))
    assert argv[:3] == ["/v/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert option(argv, "model") == str(Path("model").resolve())
    assert option(argv, "served-model-name") == "policy"
    assert (option(argv, "dtype"), option(argv, "max-model-len")) == ("bfloat16", "512")
    assert option(argv, "host") == "127.0.0.1"
    assert (env["VLLM_CPU_KVCACHE_SPACE"], env["OMP_NUM_THREADS"]) == ("3", "2")


@pytest.mark.parametrize(("transport", "backend"), [("file", "safetensors_file"), ("nccl", "nccl_policy")])
def test_the_weight_backend_is_that_of_the_transport(transport: str, backend: str) -> None:
    sections = recipe().model_dump(mode="json")
    sections["generation"]["weight_transport"] = transport
    argv, _ = vllm_command(Recipe.model_validate(sections), Path("python"))
    assert json.loads(option(argv, "weight-transfer-config")) == {"backend": backend}
    assert option(argv, "worker-extension-cls") == "workers.vllm_extension.PolicyWorker"


def test_the_reasoning_parser_is_passed_only_when_there_is_one() -> None:
    assert "--reasoning-parser" not in vllm_command(recipe(), Path("python"))[0]
    argv, _ = vllm_command(recipe(reasoning_parser="qwen3"), Path("python"))
    assert option(argv, "reasoning-parser") == "qwen3"


def test_a_port_that_was_not_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a real port"):
        vllm_command(recipe(port=0), Path("python"))
