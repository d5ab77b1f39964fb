"""Which keys a resumed run may change; every key of the schema is decided."""

import pytest

from configs import keys
from configs.load import load_recipe, override_recipe
from workers.cli.resume_rules import RULES, differences, refusal_of

ALLOWED = {
    "failure": {key.name for key in keys.children("failure")},
    "grpo": {
        "max_num_steps",
        "val_period",
        "val_at_start",
        "val_at_end",
        "use_dynamic_sampling",
        "dynamic_sampling_max_gen_batches",
    },
    "rollouts": {
        "rollout_timeout_s",
        "heartbeat_timeout_s",
        "max_concurrent_rollouts",
        "max_response_bytes",
        "shutdown_grace_s",
        "max_replay_age_versions",
    },
    "generation": {
        "endpoints",
        "refit_timeout_s",
        "heartbeat_timeout_s",
        "max_refit_attempts",
        "on_failed_endpoint",
        "weight_transport",
    },
    "training": {
        "output_dir",
        "step_timeout_s",
        "assembly_timeout_s",
        "heartbeat_timeout_s",
        "max_train_attempts",
        "save_period",
        "keep_last",
        "keep_every",
        "max_logprob_gap",
        "keep_weights",
    },
    "storage": {key.name for key in keys.children("storage")},
    "temporal": {key.name for key in keys.children("temporal")} - {"task_queue"},
    "run": set[str](),
}
LEAVES = [
    key.path for key in keys.all_keys() if "." in key.path and not key.is_block and keys.PLACEHOLDER not in key.path
]


@pytest.mark.parametrize("section", sorted(ALLOWED))
def test_a_run_may_change_these_keys_of_a_section_and_no_others(section: str) -> None:
    leaves = [path for path in LEAVES if path.startswith(f"{section}.") and path.count(".") == 1]
    allowed = {path.partition(".")[2] for path in leaves if refusal_of(path) is None}
    assert allowed == {name for name in ALLOWED[section] if f"{section}.{name}" in leaves}


def test_every_refusal_says_why_and_every_rule_decides_about_some_key() -> None:
    assert all(refusal_of(path) != "it is not known to be safe" for path in LEAVES)
    for rule in RULES:
        assert any(refusal_of(path) == rule.refusal for path in LEAVES), rule


def test_differences_name_both_values_and_leave_secrets_out() -> None:
    stored = load_recipe("demo")
    wanted = override_recipe(
        stored, ["training.lr=1", "failure.max_skipped_prompts=9", "storage.dsn=postgresql://a:b@c/d", "grpo.seed=7"]
    )
    found = {one.key: (one.stored, one.wanted, one.refusal is None) for one in differences(stored, wanted)}
    assert found == {
        "grpo.seed": (42, 7, False),
        "failure.max_skipped_prompts": (4, 9, True),
        "training.lr": (0.0002, 1.0, False),
    }


def test_a_path_to_the_same_content_may_change() -> None:
    stored = load_recipe("demo")
    wanted = override_recipe(stored, ["run.dataset=/elsewhere/rows.jsonl"])
    (moved,) = differences(stored, wanted, frozenset({"run.dataset"}))
    (other,) = differences(stored, wanted)
    assert (moved.refusal, "rows of the old file" in (other.refusal or "")) == (None, True)
