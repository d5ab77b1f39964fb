"""The recipes that come with Onbelay."""

import json
from pathlib import Path

import pytest

from configs.load import load_recipe, packaged_recipes

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the production recipe refers to."""
    monkeypatch.setenv("ONBELAY_DSN", "postgresql://onbelay:hush@db/onbelay")
    monkeypatch.setenv("TEMPORAL_API_KEY", "hush")


def test_there_are_three() -> None:
    assert packaged_recipes() == ["demo", "swe_lite", "swebench_30b"]


@pytest.mark.parametrize("name", packaged_recipes())
def test_recipe_is_valid(name: str) -> None:
    recipe = load_recipe(name)

    assert recipe.gym.agents or recipe.gym.servers


def test_demo_is_three_steps_of_two_prompts_and_four_rollouts() -> None:
    grpo = load_recipe("demo").grpo

    assert (grpo.max_num_steps, grpo.num_prompts_per_step, grpo.num_generations_per_prompt) == (3, 2, 4)


@pytest.mark.parametrize("name", ["demo", "swe_lite"])
def test_recipes_for_one_machine_start_everything_themselves(name: str) -> None:
    recipe = load_recipe(name)

    assert recipe.temporal.address is None
    assert recipe.storage.dsn is None
    assert not recipe.generation.endpoints
    assert recipe.training.world_size == 1


@pytest.mark.parametrize("name", ["demo", "swe_lite"])
def test_a_training_row_may_be_as_long_as_the_server_generates(name: str) -> None:
    recipe = load_recipe(name)

    assert recipe.training.max_row_tokens >= recipe.generation.embedded.max_model_len
    assert recipe.rollouts.max_output_tokens < recipe.generation.embedded.max_model_len


@pytest.mark.parametrize("name", ["demo", "swe_lite"])
def test_servers_refer_to_servers_of_the_same_recipe(name: str) -> None:
    servers = load_recipe(name).gym.servers
    referred = [
        (value["type"], value["name"])
        for server in servers.values()
        for key, value in server.config.items()
        if key in ("model_server", "resources_server")
    ]

    assert len(referred) == 2
    assert all(servers[name].type == kind for kind, name in referred)


def test_tasks_of_swe_lite_name_its_agent() -> None:
    recipe = load_recipe("swe_lite")
    rows = [json.loads(line) for line in (ROOT / recipe.run.dataset).read_text().splitlines()]

    assert {row["agent_ref"]["name"] for row in rows} <= recipe.gym.servers.keys()


def test_production_runs_on_systems_that_exist() -> None:
    recipe = load_recipe("swebench_30b")

    assert recipe.training.world_size == 64
    assert len(recipe.generation.endpoints) == 4
    assert recipe.temporal.tls is not None
    assert not recipe.gym.servers
