"""From files and overrides to a recipe."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.load import dump_recipe, load_recipe, override_recipe
from configs.recipe import Recipe
from tests.configs.conftest import WriteRecipe


def test_two_keys_are_enough(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe())

    assert recipe.run.model == Path("models/policy")
    assert recipe.grpo.num_prompts_per_step == 32
    assert recipe.failure.min_step_batch_fraction == 0.9


def test_relative_paths_are_kept_as_given(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(), ["training.output_dir=../elsewhere", "run.dataset=./rows.jsonl"])

    assert str(recipe.training.output_dir) == "../elsewhere"
    assert recipe.run.dataset == Path("rows.jsonl")


def test_overrides_win_over_the_file_and_the_last_one_wins(write_recipe: WriteRecipe) -> None:
    path = write_recipe("grpo: {num_prompts_per_step: 8, seed: 1}\n")

    recipe = load_recipe(path, ["grpo.num_prompts_per_step=4", "grpo.num_prompts_per_step=2"])

    assert (recipe.grpo.num_prompts_per_step, recipe.grpo.seed) == (2, 1)


def test_a_whole_block_replaces_the_block_of_the_file(write_recipe: WriteRecipe) -> None:
    path = write_recipe("failure: {max_skipped_prompts: 7}\n")

    recipe = load_recipe(path, ["failure={on_dropped_prompt: park, max_backoff_s: 60}"])

    assert recipe.failure.on_dropped_prompt == "park"
    assert recipe.failure.max_backoff_s == 60
    assert recipe.failure.max_skipped_prompts == 0


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.lr=3e-4", "training", "lr", 3e-4),
        ("grpo.val_at_end=false", "grpo", "val_at_end", False),
        ("run.id=0042", "run", "id", "0042"),
        ("run.id=2030-01-01", "run", "id", "2030-01-01"),
        ("run.id='7'", "run", "id", "7"),
        ("temporal.address=host:7233", "temporal", "address", "host:7233"),
        ("temporal.ui_url=", "temporal", "ui_url", None),
        ("grpo.loss_fn.ratio_clip_c=null", "grpo", "loss_fn", None),
        ("storage.blobs_url=s3://bucket/a=b", "storage", "blobs_url", "s3://bucket/a=b"),
    ],
)
def test_override_values_are_yaml(
    write_recipe: WriteRecipe, override: str, section: str, key: str, value: object
) -> None:
    recipe = load_recipe(write_recipe(), [override])

    found = getattr(getattr(recipe, section), key)
    assert found == value if key != "loss_fn" else found.ratio_clip_c is None


def test_lists_and_named_entries_can_be_overridden(write_recipe: WriteRecipe) -> None:
    overrides = [
        "generation.endpoints=[http://vllm-0:8000, http://vllm-1:8000]",
        "gym.agents.swe=http://gym:8200",
    ]

    recipe = load_recipe(write_recipe(), overrides)

    assert [url.host for url in recipe.generation.endpoints] == ["vllm-0", "vllm-1"]
    assert recipe.gym.agents["swe"].host == "gym"


def test_the_content_of_a_gym_server_is_free(write_recipe: WriteRecipe) -> None:
    text = "gym: {servers: {agent: {type: responses_api_agents, implementation: simple_agent}}}\n"

    recipe = load_recipe(write_recipe(text), ["gym.servers.agent.config.schedule.actions_per_chunk=4"])

    assert recipe.gym.servers["agent"].config == {"schedule": {"actions_per_chunk": 4}}


def test_an_attempt_replays_what_is_recorded_by_default(write_recipe: WriteRecipe) -> None:
    rollouts = load_recipe(write_recipe()).rollouts

    assert (rollouts.evidence, rollouts.recovery.default, rollouts.max_replay_age_versions) == ("ledger", "replay", 1)
    assert (rollouts.on_content_failure, rollouts.truncate_noncontiguous_episodes) == ("mask", False)


def test_recovery_of_an_agent_and_of_a_task_can_be_overridden(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(), ["rollouts.recovery.agents.mail=none", "rollouts.recovery.tasks.read=fresh"])

    assert recipe.rollouts.recovery.agents == {"mail": "none"}
    assert recipe.rollouts.recovery.tasks == {"read": "fresh"}


def test_answers_may_be_truncated_where_they_are_the_evidence(write_recipe: WriteRecipe) -> None:
    overrides = ["rollouts.evidence=response", "rollouts.truncate_noncontiguous_episodes=true"]

    assert load_recipe(write_recipe(), overrides).rollouts.truncate_noncontiguous_episodes


def test_an_empty_tls_block_turns_tls_on(write_recipe: WriteRecipe) -> None:
    assert load_recipe(write_recipe()).temporal.tls is None
    assert load_recipe(write_recipe(), ["temporal.tls={}"]).temporal.tls is not None


@pytest.mark.parametrize("name", ["demo", "demo.yaml"])
def test_a_bare_name_finds_the_packaged_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_recipe(name).run.model == Path(".onbelay/demo/policy")


def test_a_file_in_the_working_folder_wins_over_a_packaged_name(
    tmp_path: Path, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe().rename(tmp_path / "demo.yaml")
    monkeypatch.chdir(tmp_path)

    assert load_recipe("demo.yaml").run.model == Path("models/policy")


def test_a_missing_file_is_named_with_the_packaged_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: this recipe does not exist.*demo, swe_lite"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_recipe(tmp_path)


def test_a_dump_reads_back_as_the_same_recipe(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    secret = "postgresql://user:${not a variable@host/db"
    overrides = [f"storage.dsn='{secret.replace('${', '$${')}'", "temporal.tls={}", "gym.agents.a=http://h:1/x"]
    recipe = load_recipe(write_recipe("generation: {endpoints: [http://a:1]}\n"), overrides)

    (tmp_path / "dump.yaml").write_text(dump_recipe(recipe, reveal_secrets=True))
    again = load_recipe(tmp_path / "dump.yaml")

    assert again == recipe
    assert again.storage.dsn is not None
    assert again.storage.dsn.get_secret_value() == secret


def test_a_recipe_in_memory_takes_overrides(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(), ["storage.dsn='postgresql://u:$${x}@h/d'", "grpo.seed=3"])

    changed = override_recipe(recipe, ["grpo.max_num_steps=9"])

    assert changed.grpo.max_num_steps == 9
    assert override_recipe(changed, [f"grpo.max_num_steps={recipe.grpo.max_num_steps}"]) == recipe
    with pytest.raises(ConfigError, match=r"Did you mean `grpo.max_num_steps`"):
        override_recipe(recipe, ["grpo.max_num_step=9"])


def test_a_dump_hides_secrets(write_recipe: WriteRecipe) -> None:
    recipe = load_recipe(write_recipe(), ["storage.dsn=postgresql://u:hush@h/d", "temporal.api_key=hush-hush"])

    assert "hush" not in dump_recipe(recipe)
    assert "hush" not in repr(recipe)


@given(
    lr=st.floats(min_value=1e-30, max_value=1e30),
    seed=st.integers(min_value=0, max_value=2**62),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True),
    model=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=40),
)
def test_every_value_survives_the_dump(lr: float, seed: int, name: str, model: str) -> None:
    settings = {
        "run": {"id": name, "model": model, "dataset": "d"},
        "grpo": {"seed": seed},
        "training": {"lr": lr},
    }
    recipe = Recipe.model_validate(settings)

    assert Recipe.model_validate(yaml.safe_load(dump_recipe(recipe, reveal_secrets=True))) == recipe
