"""Which keys of its recipe a run may change when it is resumed, and why each of the others would corrupt it. Pure.

The first rule whose pattern fits a dotted key counts. `*` stands for the rest of a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from pydantic import JsonValue

from configs.recipe import Recipe

SAME_CONTENT = ("run.model", "run.dataset", "run.validation_dataset")


@dataclass(frozen=True)
class Rule:
    """Keys, and why they may not change; None: they may."""

    patterns: tuple[str, ...]
    refusal: str | None


@dataclass(frozen=True)
class Difference:
    """A key whose value is another one than the run has."""

    key: str
    stored: JsonValue
    wanted: JsonValue
    refusal: str | None


_AGAIN = "steps that are applied again from their stored batches would not end with the same weights"
_SAMPLED = "rollouts that are replayed in part would be sampled in two ways"
RULES = (
    Rule(("temporal.task_queue",), "the run's workflows and its place in the ledger are bound to its task queue"),
    Rule(("storage.*", "temporal.*", "gym.*", "logger.*"), None),
    Rule(("generation.endpoints",), None),
    Rule(("generation.refit_timeout_s", "generation.heartbeat_timeout_s", "generation.max_refit_attempts"), None),
    Rule(("generation.on_failed_endpoint", "generation.weight_transport"), None),
    Rule(("generation.embedded.port", "generation.embedded.threads", "generation.embedded.kv_cache_gib"), None),
    Rule(("generation.*",), "what a policy version samples would change within the run"),
    Rule(("failure.*",), None),
    Rule(("grpo.max_num_steps", "grpo.val_period", "grpo.val_at_start", "grpo.val_at_end"), None),
    Rule(("grpo.use_dynamic_sampling", "grpo.dynamic_sampling_max_gen_batches"), None),
    Rule(("grpo.max_val_samples",), "evaluations before and after could not be compared"),
    Rule(
        ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
        "groups and batches of the steps in flight have the old size",
    ),
    Rule(("grpo.seed",), "it is the order of the prompts: some would be trained twice, others never"),
    Rule(("grpo.*",), _AGAIN),
    Rule(
        (
            "rollouts.rollout_timeout_s",
            "rollouts.heartbeat_timeout_s",
            "rollouts.max_concurrent_rollouts",
            "rollouts.max_response_bytes",
            "rollouts.shutdown_grace_s",
            "rollouts.max_replay_age_versions",
        ),
        None,
    ),
    Rule(("rollouts.temperature", "rollouts.top_p", "rollouts.max_output_tokens", "rollouts.sampling_seed"), _SAMPLED),
    Rule(
        ("rollouts.max_lookahead_versions",), "groups that are sampled ahead already were sampled within the old bound"
    ),
    Rule(("rollouts.*",), "rollouts and groups that have settled already were judged by the old value"),
    Rule(
        (
            "training.output_dir",
            "training.step_timeout_s",
            "training.assembly_timeout_s",
            "training.heartbeat_timeout_s",
            "training.max_train_attempts",
            "training.save_period",
            "training.keep_*",
            "training.max_logprob_gap",
        ),
        None,
    ),
    Rule(("training.max_row_tokens",), "rollouts that have settled already were judged by the old value"),
    Rule(("training.*",), _AGAIN),
    Rule(("run.id",), "every record of the run carries its id"),
    Rule(("run.model",), "policy version 0 would be another model, and the steps applied so far start from it"),
    Rule(("run.dataset",), "the prompts claimed so far are rows of the old file"),
    Rule(("run.validation_dataset",), "evaluations before and after could not be compared"),
)


def refusal_of(key: str) -> str | None:
    """Why a key may not change; None where it may."""
    for rule in RULES:
        if any(fnmatchcase(key, pattern) for pattern in rule.patterns):
            return rule.refusal
    return "it is not known to be safe"


def differences(stored: Recipe, wanted: Recipe, same_content: frozenset[str] = frozenset()) -> list[Difference]:
    """Every key that differs, in the order of the schema. Secrets are no part of a run and are left out; paths in
    `same_content` lead to the content that the run was started with."""
    old, new = _leaves(stored), _leaves(wanted)
    found: list[Difference] = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if before != after and key not in _SECRETS:
            refusal = None if key in same_content else refusal_of(key)
            found.append(Difference(key, before, after, refusal))
    return found


_SECRETS = ("storage.dsn", "temporal.api_key")


def _leaves(recipe: Recipe) -> dict[str, JsonValue]:
    """Dotted keys; a mapping whose names the user chose is one value."""
    return dict(_flat("", recipe.model_dump(mode="json")))


def _flat(prefix: str, block: Mapping[str, Any]) -> list[tuple[str, JsonValue]]:
    leaves: list[tuple[str, JsonValue]] = []
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not key.startswith(("gym.", "rollouts.recovery.", "temporal.tls")):
            leaves += _flat(f"{key}.", cast(dict[str, Any], value))
        else:
            leaves.append((key, value))
    return leaves
