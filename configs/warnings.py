"""Combinations of keys that are valid and do not do what one would expect. Pure; `config validate` prints them."""

import math

from configs.failure import floor_of
from configs.recipe import Recipe

_DAY_S = 86_400


def warnings_of(recipe: Recipe) -> list[str]:
    """One paragraph for each combination: the keys, what happens, and what to do."""
    return [told for find in _SURPRISES for told in find(recipe)]


def _floor_beats_budget(recipe: Recipe) -> list[str]:
    failure, prompts = recipe.failure, recipe.grpo.num_prompts_per_step
    floor = floor_of(prompts, failure.min_step_batch_fraction)
    budgets = {
        "max_consecutive_dropped_prompts": failure.max_consecutive_dropped_prompts,
        "max_skipped_prompts": failure.max_skipped_prompts,
    }
    allowed = [f"failure.{name} ({limit})" for name, limit in budgets.items() if limit]
    if failure.on_dropped_prompt != "shrink" or floor < prompts or not allowed:
        return []
    if prompts == 1:
        return [
            f"{' and '.join(allowed)} cannot be used: grpo.num_prompts_per_step is 1, and a step without a group does "
            "not train, so the first dropped group ends the run. Set failure.on_dropped_prompt to replace or park."
        ]
    highest = math.floor((prompts - 1) / prompts * 1000) / 1000
    return [
        f"{' and '.join(allowed)} cannot be used: a step needs {floor} of its {prompts} groups "
        f"(failure.min_step_batch_fraction {failure.min_step_batch_fraction:g}), so the first dropped group ends the "
        f"run. Lower the fraction to {highest:g} or less, or set failure.on_dropped_prompt to replace or park."
    ]


def _nothing_is_replaced(recipe: Recipe) -> list[str]:
    failure = recipe.failure
    if failure.on_dropped_prompt != "replace":
        return []
    kinds = {
        "max_consecutive_dropped_prompts": ("infrastructure", failure.max_consecutive_dropped_prompts),
        "max_skipped_prompts": ("data", failure.max_skipped_prompts),
    }
    return [
        f"failure.on_dropped_prompt is replace, but failure.{name} is 0: a group that is dropped for {kind} failures "
        "ends the run before it is replaced. Raise it."
        for name, (kind, limit) in kinds.items()
        if limit == 0
    ]


def _parked_longer_than_kept(recipe: Recipe) -> list[str]:
    failure, temporal = recipe.failure, recipe.temporal
    if failure.on_dropped_prompt != "park" or temporal.address is not None:
        return []
    if failure.park_timeout_s <= temporal.retention_days * _DAY_S:
        return []
    return [
        f"failure.park_timeout_s ({failure.park_timeout_s:g}, {failure.park_timeout_s / _DAY_S:.1f} days) exceeds "
        f"temporal.retention_days ({temporal.retention_days}): while a group waits, the histories of the groups that "
        "ended beside it are forgotten. Raise the retention, or park for a shorter time."
    ]


def _nothing_to_compare(recipe: Recipe) -> list[str]:
    if recipe.grpo.num_generations_per_prompt > 1:
        return []
    return [
        "grpo.num_generations_per_prompt is 1: a rollout has no siblings to be compared with, so every advantage is 0 "
        "and nothing is learned from rewards. Raise it."
    ]


def _first_equal_group_ends_the_run(recipe: Recipe) -> list[str]:
    grpo = recipe.grpo
    if not grpo.use_dynamic_sampling or grpo.dynamic_sampling_max_gen_batches > 1:
        return []
    return [
        "grpo.dynamic_sampling_max_gen_batches is 1 with grpo.use_dynamic_sampling: a step samples its prompts once, "
        "so the first group whose rewards are all equal ends the run. Raise it."
    ]


def _cut_distribution(recipe: Recipe) -> list[str]:
    top_p = recipe.rollouts.top_p
    if top_p == 1:
        return []
    return [
        f"rollouts.top_p is {top_p:g}: vLLM samples from the tokens that this leaves, and its log-probabilities are of "
        "them, while the trainer's are of all tokens. Ratios between the two (importance sampling, "
        "grpo.seq_logprob_error_threshold, the metrics of the gap) see a difference that is no error. Set it to 1, "
        "unless you want that."
    ]


def _older_versions_are_filtered(recipe: Recipe) -> list[str]:
    ahead, threshold = recipe.rollouts.max_lookahead_versions, recipe.grpo.seq_logprob_error_threshold
    if not ahead or threshold is None:
        return []
    return [
        f"grpo.seq_logprob_error_threshold ({threshold:g}) with rollouts.max_lookahead_versions ({ahead}): a row that "
        "was sampled by an older policy version differs from the trainer for that reason too, and is dropped the more "
        "the policy has learned. Choose the threshold for such rows, or leave it out."
    ]


def _unbounded_row_weights(recipe: Recipe) -> list[str]:
    loss = recipe.grpo.loss_fn
    unbounded = loss.use_importance_sampling_correction and loss.truncated_importance_sampling_type is None
    if not (unbounded and loss.sequence_level_importance_ratios):
        return []
    return [
        "grpo.loss_fn.use_importance_sampling_correction with sequence_level_importance_ratios: the weight of a row is "
        "the product of the weights of its tokens, which grows or vanishes with their number. Bound it with "
        "truncated_importance_sampling_type tis or icepop."
    ]


def _raw_log_probabilities(recipe: Recipe) -> list[str]:
    rollouts = recipe.rollouts
    if rollouts.evidence != "response" or rollouts.temperature == 1:
        return []
    return [
        f"rollouts.temperature is {rollouts.temperature:g} with rollouts.evidence: response: the trainer's "
        "log-probabilities are those at this temperature. The agent's model server must report the same (vLLM's "
        "--logprobs-mode processed_logprobs); by default vLLM reports those at temperature 1."
    ]


def _rows_above_the_pass(recipe: Recipe) -> list[str]:
    training = recipe.training
    if training.train_micro_batch_tokens >= training.max_row_tokens:
        return []
    return [
        f"training.train_micro_batch_tokens ({training.train_micro_batch_tokens}) is below training.max_row_tokens "
        f"({training.max_row_tokens}): a row between the two trains all the same, alone in a pass with more tokens "
        "than that. Raise the first to what fits in memory, and lower the second to it."
    ]


def _kept_checkpoints_are_not_written(recipe: Recipe) -> list[str]:
    every, period = recipe.training.keep_every, recipe.training.save_period
    if every == 0 or every % period == 0 or period % every == 0:
        return []
    return [
        f"training.keep_every ({every}) does not fit training.save_period ({period}): of the checkpoints on schedule, "
        f"only those of versions that {math.lcm(every, period)} divides are kept for good. Make one a multiple of the "
        "other."
    ]


def _nobody_to_go_on_with(recipe: Recipe) -> list[str]:
    generation = recipe.generation
    if generation.on_failed_endpoint != "quarantine" or len(generation.endpoints) > 1:
        return []
    return [
        "generation.on_failed_endpoint is quarantine, but there is only one endpoint: without it nothing samples, so "
        "it is waited for all the same. Give generation.endpoints another one, or set on_failed_endpoint to wait."
    ]


_SURPRISES = (
    _floor_beats_budget,
    _nothing_is_replaced,
    _parked_longer_than_kept,
    _nothing_to_compare,
    _first_equal_group_ends_the_run,
    _cut_distribution,
    _older_versions_are_filtered,
    _unbounded_row_weights,
    _raw_log_probabilities,
    _rows_above_the_pass,
    _kept_checkpoints_are_not_written,
    _nobody_to_go_on_with,
)
