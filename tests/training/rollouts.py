"""Settled rollouts and their rows, without a ledger, and the micro-batches of rows on one rank."""

import numpy as np
import torch

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.microbatches import MicroBatch, micro_batches
from storage.records import SettledRollout


def settled(
    group: int, index: int, reward: float | None, state: str = "valid", *, segments: int = 1, truncated: bool = False
) -> SettledRollout:
    """Rollout `index` of a group of step 0 of the run `climb`."""
    group_id = f"climb/step-0/group-{group}"
    return SettledRollout.model_validate(
        {
            "rollout_id": f"{group_id}/rollout-{index}",
            "group_id": group_id,
            "index": index,
            "state": state,
            "attempt": 0,
            "reward": reward,
            "truncated": truncated,
            "reason": None,
            "policy_version_min": 0,
            "policy_version_max": 0,
            "evidence_digest": "e" * 64,
            "segments": segments,
            "model_calls": 1,
            "attempts": 1,
            "generated_calls": 1,
            "replayed_calls": 0,
        }
    )


def row(owner: SettledRollout, segment: int = 0, sampled: int = 1, *, prompt: int = 2, after: int = 0) -> TrainingRow:
    """Prompt tokens, then sampled ones of log-probability -0.5, then tokens that were only read."""
    mask = np.array([0] * prompt + [1] * sampled + [0] * after, dtype=np.uint8)
    return TrainingRow(
        rollout_id=owner.rollout_id,
        segment=segment,
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        log_probs=-0.5 * mask.astype(np.float32),
        advantage=0.0,
    )


def own_rows(rollouts: list[SettledRollout], sampled: int = 1) -> dict[str, list[TrainingRow]]:
    """The rows of the valid ones: one for each of their segments."""
    return {
        rollout.rollout_id: [row(rollout, segment, sampled) for segment in range(rollout.segments)]
        for rollout in rollouts
        if rollout.state == "valid"
    }


def passes(
    batch: TrainingBatch,
    rows_per_pass: int,
    *,
    token_level: bool = True,
    max_tokens: int = 100_000,
    ranks: int = 1,
    rank: int = 0,
) -> list[MicroBatch]:
    """The micro-batches of one rank, on the CPU."""
    return micro_batches(
        batch,
        rows_per_pass=rows_per_pass,
        max_tokens=max_tokens,
        token_level=token_level,
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        device=torch.device("cpu"),
    )
