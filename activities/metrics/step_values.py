"""The metrics of a step that its ledger rows give, by the names of the catalogue; zeros where there is nothing.

Pure. Rewards, turns and tokens are those of valid rollouts, the ones that train; what was cut off is counted over all
that answered, since a rollout may be masked for just that.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from storage.step_statistics import Retries, RolloutStatistics, RunCounters, StepStatistics

PADDING_ROWS = "train/padding_rows"
POLICY_TRAINING = "timing/train/policy_training"


def step_values(
    read: StepStatistics, agents: Mapping[int, str], measured: Mapping[str, float], *, ranks: int, prompts: int
) -> dict[str, float]:
    """All of them. `agents` names the agent of each dataset row, `measured` are the metrics that the step came with;
    `ranks` are the trainer's processes, `prompts` the places of a step."""
    values = _rollouts(read.rollouts) | _agents(read.rollouts, agents)
    values |= _run(read.run, read.retries) | _finalized(read)
    batch = read.batch
    tokens, seconds = (0 if batch is None else batch.trained_tokens), measured.get(POLICY_TRAINING, 0.0)
    rows, rollouts = (0, 0) if batch is None else (batch.rows, batch.rollouts)
    padding = measured.get(PADDING_ROWS, 0.0)
    placeholders = sum(rollout.state != "valid" for rollout in read.rollouts)
    return values | {
        "train/consumed_samples": float(read.run.consumed_groups),
        "train/consumed_rollouts": float(read.run.consumed_rollouts),
        "train/set_aside_prompt_groups": float(read.run.set_aside_of_step),
        "train/dynamic_sampling_num_gen_batches": (prompts + read.run.set_aside_of_step) / prompts,
        "train/segments_max": 0.0 if batch is None else float(batch.segments_max),
        "train/evicted_stale_prompt_groups": 0.0,
        "train/aborted_stale_inflight_groups": 0.0,
        "timing/train/valid_tokens_per_sec_per_gpu": tokens / seconds / ranks if seconds > 0 else 0.0,
        "context_compaction/logical_rollouts": float(rollouts),
        "context_compaction/physical_traces": float(rows),
        "context_compaction/padding_rows": padding,
        "context_compaction/physical_rows": rows + placeholders + padding,
        "context_compaction/eligible_action_tokens": float(tokens),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, max, min, median and sample standard deviation; 0 for what needs more values than there are."""
    return {
        f"{name}/mean": statistics.fmean(values) if values else 0.0,
        f"{name}/max": max(values, default=0.0),
        f"{name}/min": min(values, default=0.0),
        f"{name}/median": statistics.median(values) if values else 0.0,
        f"{name}/stddev": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the values around it; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def _rollouts(rollouts: Sequence[RolloutStatistics]) -> dict[str, float]:
    valid = [rollout for rollout in rollouts if rollout.state == "valid"]
    answered = [rollout for rollout in rollouts if rollout.answered]
    turns = [float(rollout.turns) for rollout in valid]
    generated = spread("gen_tokens_per_sample", [float(rollout.generated_tokens) for rollout in valid])
    truncated = sum(rollout.truncated for rollout in answered)
    return {
        **spread("total_reward", [rollout.reward for rollout in valid if rollout.reward is not None]),
        **spread("turns_per_sample", turns),
        "turns_per_sample/p95": percentile(turns, 95),
        "turns_per_sample/p99": percentile(turns, 99),
        **spread("total_tokens_per_sample", [float(rollout.total_tokens) for rollout in valid]),
        **generated,
        **spread("max_gen_tokens_per_turn", [float(rollout.most_generated_tokens) for rollout in valid]),
        "mean_gen_tokens_per_sample": generated["gen_tokens_per_sample/mean"],
        "truncation_rate": _share(truncated, len(answered)),
        "natural_termination_rate": _share(len(answered) - truncated, len(answered)),
    }


def _agents(rollouts: Sequence[RolloutStatistics], agents: Mapping[int, str]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {agents[rollout.row_index]: [] for rollout in rollouts}
    for rollout in rollouts:
        if rollout.state == "valid" and rollout.reward is not None:
            rewards[agents[rollout.row_index]].append(rollout.reward)
    values: dict[str, float] = {}
    for agent, own in rewards.items():
        values |= spread(f"{agent}/reward", own) | spread(f"{agent}/noncontiguous_truncated", [])
    return values


def _run(run: RunCounters, retries: Sequence[Retries]) -> dict[str, float]:
    names = {"infra": "rollout/redispatch_total", "data": "rollout/data_retry_total"}
    totals = dict.fromkeys(names.values(), 0.0)
    classes: dict[str, float] = {}
    for retried in retries:
        name = names[retried.bucket]
        totals[name] += retried.count
        classes[f"{name}/{retried.failure_class}"] = float(retried.count)
    return {
        **totals,
        **classes,
        "rollout/gym_row_redispatch_total": sum(totals.values()),
        "rollout/committed_total": float(run.committed_groups),
        "rollout/skipped_total": float(run.dropped_groups),
        "rollout/data_failures_total": float(run.dropped_for_data),
        "rollout/infra_drops_total": float(run.dropped_for_infra),
        "rollout/max_consecutive_infra_drops": float(run.max_consecutive_infra_drops),
        "rollout/inflight": float(run.open_groups),
        "rollout/idle_s": run.idle_s,
        "rollout/train_steps": float(run.train_steps),
    }


def _finalized(read: StepStatistics) -> dict[str, float]:
    answered = [rollout for rollout in read.rollouts if rollout.answered]
    with_tokens = sum(rollout.calls_with_tokens for rollout in answered)
    with_text = sum(rollout.calls_with_text for rollout in answered)
    return {
        "finalize/invalid_row_rate": _share(
            sum(rollout.state != "valid" for rollout in read.rollouts), len(read.rollouts)
        ),
        "finalize/calls_per_rollout": _share(sum(rollout.calls for rollout in answered), len(answered)),
        "finalize/token_in_calls": float(with_tokens),
        "finalize/text_root_calls": float(with_text),
        "finalize/token_in_rate": _share(with_tokens, with_tokens + with_text),
        "finalize/capture_poisoned_rollouts": float(sum(rollout.poisoned for rollout in answered)),
        "finalize/group_dropped": float(read.run.dropped_of_step),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
