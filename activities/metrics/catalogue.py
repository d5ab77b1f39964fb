"""Every metric of a step: its name, what it says, and where it comes from. A recorded step has all of them, zeros too.

Names are NeMo-RL's wherever the same thing exists here. Left out, because they would say nothing here:

* `rollout/data_failures_total/<class>`, `rollout/infra_drops_total/<class>`: a group is dropped for a sentence, which
  may name several rollouts of different classes; retries are counted by class.
* `timing/train/logprob_inference_prep`: no data is moved to another engine before log-probabilities are computed.
* `timing/rollout/*`: rollouts of several steps run at once, each in an activity of its own, with its own times in the
  Temporal UI; a step waits for them in `timing/train/exposed_generation`.
* `timing/rollout_checkpoint/*`, `groups_reused`, `siblings_reused`: rollouts are in the ledger as they happen, so no
  moment writes them and none reads them back.
* `finalize/heuristic_terminal_count` and `_fraction`: the ledger keeps which responses were selected, not how.
* `row_assembly/*_ms`: rows are cut as each rollout settles; a step reads them in `timing/train/advantage_calculation`.
* `{agent}/full_result`: a text, not a number; `onbelay rollout show` prints it.
* `{agent}/<key>/*` for other keys of an answer than its reward: the ledger keeps no others as numbers.
* fleet and router counters: endpoints are not restarted here; those set aside are `train/quarantined_endpoints`.
"""

import re
from dataclasses import dataclass
from typing import Literal

Source = Literal["trainer", "workflow", "ledger"]

SPREAD = ("mean", "max", "min", "median", "stddev")
TAIL = ("p95", "p99")


@dataclass(frozen=True)
class Metric:
    """`{agent}` and `{failure_class}` in a name stand for those that occur, and are not there for others. Source:
    measured by the trainer, timed and counted by the workflow, or read from the ledger as the step is recorded."""

    name: str
    unit: str
    meaning: str
    source: Source

    @property
    def is_pattern(self) -> bool:
        """Whether the name has a placeholder."""
        return "{" in self.name


def _spread(name: str, unit: str, meaning: str, *, tail: bool = False) -> tuple[Metric, ...]:
    parts = SPREAD + TAIL if tail else SPREAD
    return tuple(Metric(f"{name}/{part}", unit, f"{meaning}: {part}", "ledger") for part in parts)


def _trainer(name: str, unit: str, meaning: str) -> Metric:
    timing = name.removeprefix("timing/")
    return Metric(f"timing/train/{timing}" if timing != name else f"train/{name}", unit, meaning, "trainer")


TRAINER = (
    _trainer("loss", "", "loss of the step; its gradient is what was applied"),
    _trainer("grad_norm", "", "norm of the gradient before clipping"),
    _trainer("lr", "", "learning rate"),
    _trainer("wd", "", "weight decay"),
    _trainer("global_valid_toks", "tokens", "tokens that train: loss mask 1, after the log-probability filter"),
    _trainer("global_valid_seqs", "rows", "rows that train"),
    _trainer("num_valid_samples", "rollouts", "rollouts that train"),
    _trainer("total_num_tokens", "tokens", "tokens of all rows, prompts included, padding not"),
    _trainer("advantages/mean", "", "advantage over trained tokens: mean"),
    _trainer("advantages/max", "", "advantage over trained tokens: max"),
    _trainer("advantages/min", "", "advantage over trained tokens: min"),
    _trainer("probs_ratio", "", "probability ratio of current and previous policy: mean"),
    _trainer("probs_ratio_min", "", "probability ratio: min"),
    _trainer("probs_ratio_max", "", "probability ratio: max"),
    _trainer("probs_ratio_clamped", "", "clipped probability ratio: mean"),
    _trainer("probs_ratio_clamped_min", "", "clipped probability ratio: min"),
    _trainer("probs_ratio_clamped_max", "", "clipped probability ratio: max"),
    _trainer("kl_penalty", "", "KL penalty against the reference policy, before its weight in the loss"),
    _trainer("token_mult_prob_error", "", "mean of exp(|log-probability of vLLM - of the trainer|); 1 is equal"),
    _trainer("gen_kl_error", "nats", "KL(vLLM || trainer), estimated on the sampled tokens"),
    _trainer("policy_kl_error", "nats", "KL(trainer || vLLM), likewise"),
    _trainer("js_divergence_error", "nats", "Jensen-Shannon divergence of the two, likewise"),
    _trainer("sampling_importance_ratio", "", "weight that corrects for sampling by vLLM: mean"),
    _trainer("is_oob_ratio", "share", "tokens (rows with seq-mask-tis) whose weight was outside its bounds"),
    _trainer("approx_entropy", "nats", "entropy of the policy, estimated on the sampled tokens"),
    _trainer("positive_nll_loss", "nats", "mean of -log p over tokens of rows with a positive advantage"),
    *(
        _trainer(f"{part}_seq_mult_prob_error{when}", "", f"exp(|log-probability difference|) of a row, {part}{more}")
        for when, more in (("", ""), ("_after_mask", ", of the rows that the filter kept"))
        for part in ("max", "mean", "min")
    ),
    _trainer("num_masked_seqs_by_logprob_error", "rows", "rows that the log-probability filter took out"),
    _trainer("masked_correct_pct", "share", "rows with a positive advantage among those taken out"),
    _trainer("logprob_gap_max", "nats", "largest |log-probability of vLLM - of the trainer|: on-policy evidence"),
    _trainer("logprob_gap_mean", "nats", "the same: mean"),
    _trainer("logprob_gap_kl", "nats", "KL(vLLM || trainer) by the k3 estimate"),
    _trainer("padding_rows", "rows", "rows that only fill the last pass"),
    _trainer("micro_batches", "passes", "forward and backward passes of one data-parallel rank"),
    _trainer("timing/policy_and_reference_logprobs", "s", "passes without a gradient: reference and previous policy"),
    _trainer("timing/training_prep", "s", "from rows to micro-batches"),
    _trainer("timing/gradient", "s", "forward and backward passes"),
    _trainer("timing/optimizer", "s", "clipping and the optimizer step"),
)

WORKFLOW = (
    Metric("train/reward", "", "mean reward of the valid rollouts", "workflow"),
    Metric("train/prompt_groups", "groups", "groups that were trained", "workflow"),
    Metric("train/dropped_prompt_groups", "groups", "groups that this step gave up", "workflow"),
    Metric("train/replaced_prompt_groups", "groups", "groups that took the place of a dropped one", "workflow"),
    Metric("train/promoted_prompt_groups", "groups", "groups that a later step lent", "workflow"),
    Metric("train/given_away_prompt_groups", "groups", "groups lent to an earlier step", "workflow"),
    Metric("train/refused_late", "groups", "changes that were asked for after the step had closed", "workflow"),
    Metric("train/staleness_mean", "versions", "age of the policy that sampled: mean over groups", "workflow"),
    Metric("train/staleness_max", "versions", "the same: max", "workflow"),
    Metric("train/stale_prompt_groups", "groups", "groups older than the look-ahead allows", "workflow"),
    Metric("train/quarantined_endpoints", "endpoints", "vLLM servers that did not take part in the refit", "workflow"),
    Metric("timing/train/total_step_time", "s", "from the step's turn to the refit", "workflow"),
    Metric("timing/train/exposed_generation", "s", "waiting for rollouts, then assembling the batch", "workflow"),
    Metric(
        "timing/train/advantage_calculation", "s", "assembling the batch and its advantages, of the former", "workflow"
    ),
    Metric("timing/train/policy_training", "s", "the trainer's step, with replayed steps and a checkpoint", "workflow"),
    Metric("timing/train/checkpointing", "s", "writing a checkpoint, of the former", "workflow"),
    Metric("timing/train/weight_sync", "s", "publishing the weights and refit", "workflow"),
)

_NEVER = "always 0: "

LEDGER = (
    Metric("train/consumed_samples", "groups", "groups trained in the run so far", "ledger"),
    Metric("train/consumed_rollouts", "rollouts", "rollouts of those groups, masked ones included", "ledger"),
    Metric("train/set_aside_prompt_groups", "groups", "groups of this step whose rewards were all equal", "ledger"),
    Metric(
        "train/dynamic_sampling_num_gen_batches", "batches", "groups sampled, set aside ones too, by places", "ledger"
    ),
    Metric("train/segments_max", "segments", "most segments of one rollout of the step", "ledger"),
    Metric(
        "train/evicted_stale_prompt_groups",
        "groups",
        _NEVER + "a finished group is trained, whatever its age; the look-ahead bounds that",
        "ledger",
    ),
    Metric(
        "train/aborted_stale_inflight_groups",
        "groups",
        _NEVER + "no group is stopped because a newer policy came",
        "ledger",
    ),
    Metric(
        "timing/train/valid_tokens_per_sec_per_gpu", "tokens/s", "trained tokens by policy_training by ranks", "ledger"
    ),
    *_spread("total_reward", "", "reward of a valid rollout"),
    *_spread("turns_per_sample", "turns", "selected responses of a valid rollout", tail=True),
    *_spread("total_tokens_per_sample", "tokens", "tokens of a valid rollout's segments, prompts included"),
    *_spread("gen_tokens_per_sample", "tokens", "sampled tokens of a valid rollout's selected responses"),
    *_spread("max_gen_tokens_per_turn", "tokens", "longest selected response of a valid rollout"),
    Metric("mean_gen_tokens_per_sample", "tokens", "sampled tokens of a valid rollout: mean", "ledger"),
    Metric("truncation_rate", "share", "answered rollouts whose last response was cut off", "ledger"),
    Metric("natural_termination_rate", "share", "answered rollouts that ended by themselves", "ledger"),
    *_spread("{agent}/reward", "", "reward of a valid rollout of this agent"),
    *_spread("{agent}/noncontiguous_truncated", "share", "answers cut where the agent rewrote earlier tokens"),
    Metric("rollout/committed_total", "groups", "groups of the run that ended well", "ledger"),
    Metric("rollout/skipped_total", "groups", "groups of the run that were dropped, for whatever reason", "ledger"),
    Metric("rollout/redispatch_total", "attempts", "failed for the infrastructure and tried again", "ledger"),
    Metric("rollout/redispatch_total/{failure_class}", "attempts", "of them, those of this class", "ledger"),
    Metric("rollout/data_retry_total", "attempts", "failed for their data and tried again", "ledger"),
    Metric("rollout/data_retry_total/{failure_class}", "attempts", "of them, those of this class", "ledger"),
    Metric("rollout/data_failures_total", "groups", "groups of the run dropped for their data", "ledger"),
    Metric("rollout/infra_drops_total", "groups", "groups of the run dropped for the infrastructure", "ledger"),
    Metric(
        "rollout/max_consecutive_infra_drops", "groups", "most of them with no group between that ended well", "ledger"
    ),
    Metric(
        "rollout/gym_row_redispatch_total", "attempts", "rollouts sent to NeMo-Gym again, for either reason", "ledger"
    ),
    Metric("rollout/inflight", "groups", "open groups of the run as the step was recorded", "ledger"),
    Metric("rollout/idle_s", "s", "since a group ended or a step was applied, as the step was recorded", "ledger"),
    Metric("rollout/train_steps", "steps", "applied steps so far", "ledger"),
    Metric("finalize/invalid_row_rate", "share", "rollouts of trained groups that are masked or lost", "ledger"),
    Metric(
        "finalize/calls_per_rollout",
        "calls",
        "responses of the settling attempt, dead branches included: mean",
        "ledger",
    ),
    Metric("finalize/token_in_calls", "calls", "of them, those that continue an earlier one token for token", "ledger"),
    Metric("finalize/text_root_calls", "calls", "of them, those that begin a segment or conversation", "ledger"),
    Metric("finalize/token_in_rate", "share", "token_in_calls of both", "ledger"),
    Metric(
        "finalize/capture_poisoned_rollouts",
        "rollouts",
        "masked, because what they went through cannot be told from their calls",
        "ledger",
    ),
    Metric("finalize/group_dropped", "groups", "dropped groups of this step", "ledger"),
    Metric("context_compaction/logical_rollouts", "rollouts", "rollouts of the batch, masked ones included", "ledger"),
    Metric("context_compaction/physical_traces", "rows", "segments that train", "ledger"),
    Metric("context_compaction/padding_rows", "rows", "rows that only fill the last pass", "ledger"),
    Metric(
        "context_compaction/physical_rows", "rows", "all rows of the batch: segments, placeholders, padding", "ledger"
    ),
    Metric(
        "context_compaction/eligible_action_tokens", "tokens", "sampled tokens of the batch with loss mask 1", "ledger"
    ),
)

CATALOGUE: tuple[Metric, ...] = (*TRAINER, *WORKFLOW, *LEDGER)

_PLACEHOLDERS = re.compile(r"\\\{[a-z_]+\\\}")
_PATTERNS = [re.compile(_PLACEHOLDERS.sub(".+", re.escape(metric.name))) for metric in CATALOGUE if metric.is_pattern]

ALWAYS = frozenset(metric.name for metric in CATALOGUE if not metric.is_pattern)
"""The names that every recorded step has."""


def is_known(name: str) -> bool:
    """Whether a name is in the catalogue."""
    return name in ALWAYS or any(pattern.fullmatch(name) for pattern in _PATTERNS)
