"""A small model, and the batches of a run, stored before it begins: every run of the benchmark trains the same rows.

A step whose batch is stored needs no rollouts, so that the run that follows is the product's own, without generation.
"""

import json
from pathlib import Path

import numpy as np
import torch
from temporalio.testing import ActivityEnvironment
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from activities.ledger_activities import LedgerActivities
from activities.rollouts.dataset import scan
from activities.training.batch import TrainingBatch, TrainingRow
from benchmarks.exactly_once.points import STEPS
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.ledger import Ledger
from storage.records import BegunAttempt, ReportedCall, SelectedResponse, Settlement
from workers.cli.model_files import model_digest
from workers.cli.starting import without_secrets
from workflows.messages import ClaimPrompts

GROUPS, ROLLOUTS = 2, 4
VOCABULARY = 512
ROW_TOKENS = (24, 64)
SEED = 17


def write_model(folder: Path) -> None:
    """The same weights each time. Its tokenizer is a stand-in: nothing is generated."""
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text('{"model": "stand-in"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_dataset(file: Path) -> None:
    """A row for every prompt of a run."""
    rows = (
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Task {row}"}]},
            "agent_ref": {"type": "responses_api_agents", "name": "agent"},
        }
        for row in range(STEPS * GROUPS)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def batch_of(run_id: str, step: int) -> TrainingBatch:
    """Rows of random lengths and tokens, the second half of each sampled; advantages of both signs."""
    draw = np.random.default_rng([SEED, step])
    rows: list[TrainingRow] = []
    for group in range(GROUPS):
        for rollout in range(ROLLOUTS):
            tokens = int(draw.integers(*ROW_TOKENS))
            mask = (np.arange(tokens) >= tokens // 2).astype(np.uint8)
            log_probs = (-draw.uniform(4.0, 8.0, tokens) * mask).astype(np.float32)
            rows.append(
                TrainingRow(
                    rollout_id=f"{run_id}/step-{step}/group-{group}/rollout-{rollout}",
                    segment=0,
                    tokens=draw.integers(0, VOCABULARY, tokens).astype(np.int32),
                    loss_mask=mask,
                    log_probs=log_probs,
                    advantage=float(draw.normal()),
                )
            )
    return TrainingBatch(run_id, step, tuple(rows))


async def store_run(ledger: Ledger, blobs: BlobStore, writing: LedgerActivities, recipe: Recipe) -> list[str]:
    """A run whose batches are all stored; their digests in order of steps."""
    run_id = recipe.run.id
    assert run_id is not None
    rows = scan(recipe.run.dataset)
    sections = without_secrets(recipe).model_dump(mode="json")
    model = model_digest(recipe.run.model)
    await ledger.runs.create(run_id, recipe.temporal.task_queue, sections, rows.digest, len(rows), model)
    return [await _store_step(ledger, blobs, writing, run_id, step) for step in range(STEPS)]


async def _store_step(ledger: Ledger, blobs: BlobStore, writing: LedgerActivities, run_id: str, step: int) -> str:
    wanted = ClaimPrompts(run_id=run_id, step=step, purpose="train", first_slot=0, count=GROUPS)
    claims = (await ActivityEnvironment().run(writing.claim_prompts, wanted)).claims
    batch = batch_of(run_id, step)
    group_ids = [f"{run_id}/step-{step}/group-{claim.slot}" for claim in claims]
    for group_id, claim in zip(group_ids, claims, strict=True):
        group = await ledger.groups.open(
            group_id, run_id, step, claim.slot, "train", claim.prompt_id, claim.row_index, ROLLOUTS
        )
        for rollout in group.rollouts:
            await _settle(ledger, rollout.rollout_id, step, reward=float(rollout.index % 2))
        await ledger.groups.set_state(group_id, "sealed")
    digest = await blobs.put(batch.to_bytes())
    await ledger.batches.store(
        run_id,
        step,
        digest,
        rows=len(batch.rows),
        rollouts=batch.rollouts,
        trained_tokens=batch.trained_tokens,
        segments_max=1,
        mean_reward=0.5,
        group_ids=group_ids,
    )
    return digest


async def _settle(ledger: Ledger, rollout_id: str, version: int, reward: float) -> None:
    begun = await ledger.rollouts.begin_attempt(
        rollout_id, "benchmark", recovery="replay", policy_version=version, max_replay_age_versions=0
    )
    assert isinstance(begun, BegunAttempt)
    await ledger.rollouts.settle(
        Settlement(
            rollout_id=rollout_id,
            attempt=begun.attempt,
            state="valid",
            reward=reward,
            policy_version_min=version,
            policy_version_max=version,
            evidence_digest="e" * 64,
            segments=1,
            selected=(SelectedResponse(ordinal=0, segment=0, boundary=None),),
            reported=(ReportedCall(prompt_tokens=20, generated_tokens=20, finish_reason="stop", response_id="a"),),
        )
    )
