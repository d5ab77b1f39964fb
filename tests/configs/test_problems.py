"""What a person reads about a recipe that is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.keys import PLACEHOLDER, all_keys, nearest
from configs.load import load_recipe
from tests.configs.conftest import Problems, WriteRecipe


@pytest.mark.parametrize(
    ("text", "wrong", "near"),
    [
        ("grpo: {num_prompt_per_step: 4}\n", "grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("grop: {seed: 4}\n", "grop", "grpo"),
        ("seed: 4\n", "seed", "grpo.seed"),
        ("loss_fn: {ratio_clip_min: 0.1}\n", "loss_fn", "grpo.loss_fn"),
        (
            "async_rl: {rollout_failure: {max_infra_attempts_per_prompt: 3}}\n",
            "async_rl.rollout_failure.max_infra_attempts_per_prompt",
            "failure.max_infra_attempts_per_prompt",
        ),
        ("grpo: {loss_fn: {ratio_clip_mim: 0.1}}\n", "grpo.loss_fn.ratio_clip_mim", "grpo.loss_fn.ratio_clip_min"),
        ("gym: {servers: {agent: {kind: a, typ: b}}}\n", "gym.servers.agent.typ", "gym.servers.agent.type"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(problems: Problems, text: str, wrong: str, near: str) -> None:
    assert f"recipe.yaml: unknown key `{wrong}`. Did you mean `{near}`?" in problems(text)


def test_an_unknown_override_names_itself_and_the_nearest_key(problems: Problems) -> None:
    assert problems("", "grpo.sed=4") == ["Override `grpo.sed=4`: unknown key `grpo.sed`. Did you mean `grpo.seed`?"]


def test_a_key_like_no_other_lists_the_keys_beside_it(problems: Problems) -> None:
    [problem] = problems("temporal: {tls: {zzz: 1}}\n")

    assert "Keys of `temporal.tls`: server_root_ca, client_cert, client_key, domain." in problem


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grpo: {seed: four}\n", "`grpo.seed` is 'four', but must be an integer, at least 0."),
        ("rollouts: {top_p: 2}\n", "`rollouts.top_p` is 2, but must be a number, above 0, at most 1."),
        (
            "generation: {pause_mode: stop}\n",
            "`generation.pause_mode` is 'stop', but must be one of wait, keep, abort.",
        ),
        ("generation: {endpoints: [http://a, 3]}\n", "`generation.endpoints.1` is 3, but must be a URL."),
        ("training: 5\n", "`training` is 5, but must be a block of keys."),
        ("training:\n", "`training` is empty, but must be a block of keys."),
        (
            "rollouts: {rollout_timeout_s: .inf}\n",
            "`rollouts.rollout_timeout_s` is inf, but must be a number, above 0.",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(problems: Problems, text: str, sentence: str) -> None:
    assert problems(text) == [f"recipe.yaml: {sentence}"]


def test_yes_is_not_the_number_one(problems: Problems) -> None:
    [problem] = problems("grpo: {num_prompts_per_step: yes}\n")

    assert "`grpo.num_prompts_per_step` is true, but must be an integer, at least 1" in problem


def test_a_wrong_override_is_named_instead_of_the_file(problems: Problems) -> None:
    assert problems("grpo: {seed: 1}\n", "grpo.seed=x") == [
        "Override `grpo.seed=x`: `grpo.seed` is 'x', but must be an integer, at least 0."
    ]


def test_a_missing_key_says_what_it_is_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text("run: {model: m}\n")

    with pytest.raises(ConfigError, match=r"`run.dataset` is missing\. JSONL file"):
        load_recipe(path)


def test_all_problems_are_listed_at_once(problems: Problems) -> None:
    text = "grpo: {seed: x, lr: 1}\nfailure: {backoff_base_s: 0}\n"

    found = problems(text, "nothing", "rollouts.top_p=2")

    assert len(found) == 5
    assert found[0].startswith("`nothing` is not an override: write key=value")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "failure: {backoff_base_s: 9, max_backoff_s: 3}\n",
            "max_backoff_s (3.0) must not be below backoff_base_s (9.0)",
        ),
        ("rollouts: {min_valid_rollouts_per_group: 17}\n", "exceeds grpo.num_generations_per_prompt (16)"),
        ("rollouts: {heartbeat_timeout_s: 9999}\n", "heartbeat_timeout_s (9999.0) must not exceed"),
        ("grpo: {val_at_end: true}\n", "set run.validation_dataset"),
        (
            "rollouts: {truncate_noncontiguous_episodes: true}\n",
            "whose calls are exact, so that there is nothing to truncate; use evidence: response",
        ),
        (
            "grpo: {loss_fn: {truncated_importance_sampling_type: tis}}\n",
            "needs use_importance_sampling_correction: true",
        ),
        (
            "gym: {agents: {a: http://h}, servers: {b: {type: resources_servers, implementation: c}}}\n",
            "give either `agents` (running servers) or `servers` (to be started), not both",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_an_error(problems: Problems, text: str, sentence: str) -> None:
    [problem] = problems(text)

    assert problem.startswith("recipe.yaml: ")
    assert sentence in problem


@pytest.mark.parametrize(
    "text",
    [
        "training: {router_replay: true}\n",
        "training: {router_replay: {enabled: true}}\n",
        "policy: {router_replay: {enabled: true}}\n",
    ],
)
def test_router_replay_is_refused_as_not_supported_yet(problems: Problems, text: str) -> None:
    [problem] = problems(text)

    assert "router replay (NeMo-RL's policy.router_replay.enabled) is not supported yet" in problem


def test_router_replay_is_refused_as_an_override_too(problems: Problems) -> None:
    [problem] = problems("", "training.router_replay.enabled=true")

    assert problem.startswith("Override `training.router_replay.enabled=true`: ")
    assert "is not supported yet" in problem


def test_a_wrong_recovery_mode_names_the_agent_it_was_given_for(problems: Problems) -> None:
    assert problems("rollouts: {recovery: {agents: {mail: never}}}\n") == [
        "recipe.yaml: `rollouts.recovery.agents.mail` is 'never', but must be one of replay, fresh, none."
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grpo: {seed: [1\nfailure: {}\n", "line 3, column 8"),
        ("grpo:\n  seed: 1\n seed: 2\n", "line 4, column 2"),
        ("grpo: {seed: 1}\ngrpo: {seed: 2}\n", "the key `grpo` is given twice, in line 2 and in line 3"),
        ("grpo: \x01\n", "special characters are not allowed"),
    ],
)
def test_text_that_is_not_yaml_is_named_with_its_place(problems: Problems, text: str, sentence: str) -> None:
    [problem] = problems(text)

    assert problem.startswith("recipe.yaml: not a valid YAML file: ")
    assert sentence in problem


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "this file is empty"),
        (b"- a\n", "this file is something else"),
        (b"a: \xff\n", "not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error(write_recipe: WriteRecipe, content: bytes, sentence: str) -> None:
    path = write_recipe()
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=sentence):
        load_recipe(path)


def test_an_override_without_yaml_in_it_is_an_error(problems: Problems) -> None:
    [problem] = problems("", "grpo={seed")

    assert problem.startswith("Override `grpo={seed`: the value is not YAML (line 1")


@pytest.mark.parametrize("override", ["temporal.api_key=[hush]", "storage={dsn: [hush]}", "storage={dsn: hush, lr: 1}"])
def test_no_secret_is_shown_in_an_error(problems: Problems, override: str) -> None:
    assert "hush" not in "".join(problems("", override))


@given(st.sampled_from([key.path for key in all_keys() if PLACEHOLDER not in key.path]), st.data())
def test_a_key_with_one_letter_too_many_is_recognised(path: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(min_value=path.rfind(".") + 2, max_value=len(path)))
    wrong = f"{path[:place]}q{path[place:]}"

    near = nearest(wrong)

    assert near is not None
    assert near.rpartition(".")[0] == path.rpartition(".")[0]
