"""Optimizer steps: equal to plain PyTorch, the same every time, neutral to how rows are packed."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from activities.training.batch import TrainingBatch
from activities.training.errors import EmptyBatch, NonFiniteStep, RowTooLong, TrainingError
from activities.training.loss import grpo_loss
from activities.training.megatron import engine as engine_module
from configs.grpo import LossConfig
from tests.training.samples import (
    differing,
    exported,
    greatest_difference,
    log_probs_of,
    make_batch,
    make_row,
    new_engine,
    read_model,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


def with_advantage(batch: TrainingBatch, advantage: float) -> TrainingBatch:
    rows = tuple(dataclasses.replace(row, advantage=advantage) for row in batch.rows)
    return dataclasses.replace(batch, rows=rows)


def test_two_steps_equal_transformers_with_adamw(model_dir: Path, tmp_path: Path) -> None:
    loss = LossConfig(
        reference_policy_kl_penalty=0.1,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.5,
    )
    engine = new_engine(loss, lr=1e-3, weight_decay=0.01, max_grad_norm=0.5)
    engine.load_model(model_dir)
    plain, reference = read_model(model_dir), read_model(model_dir)
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3)

    for step in range(2):
        batch = make_batch(step)
        metrics = engine.train(batch)
        total = torch.zeros(())
        for row in batch.rows:
            curr = log_probs_of(plain, row.tokens)
            with torch.no_grad():
                fixed = log_probs_of(reference, row.tokens)
            generation, mask = torch.from_numpy(row.log_probs)[1:], torch.from_numpy(row.loss_mask)[1:].float()
            advantage = torch.tensor(row.advantage, dtype=torch.float32)
            total = total + grpo_loss(curr, curr.detach(), generation, fixed, advantage, mask, loss).loss
        mean = total / batch.trained_tokens
        adamw.zero_grad()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        assert metrics["loss"] == pytest.approx(mean.item(), abs=2e-6)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    assert greatest_difference(exported(engine, tmp_path / "export"), dict(plain.state_dict())) < 1e-4


def test_the_same_steps_give_the_same_bits(model_dir: Path, tmp_path: Path) -> None:
    engine = new_engine()
    runs = []
    for name in ("one", "two"):
        engine.load_model(model_dir)
        metrics = [engine.train(make_batch(step)) for step in range(3)]
        runs.append((metrics, exported(engine, tmp_path / name)))

    assert runs[0][0] == runs[1][0]
    assert differing(runs[0][1], runs[1][1]) == []
    assert engine.version == 3


@pytest.mark.parametrize("rows_per_pass", [1, 5])
def test_how_rows_are_packed_does_not_matter(model_dir: Path, tmp_path: Path, rows_per_pass: int) -> None:
    """Seven rows: passes of one row need no padding, passes of five need three padding rows."""
    results = []
    for size in (7, rows_per_pass):
        engine = new_engine(train_micro_batch_size=size)
        engine.load_model(model_dir)
        results.append((engine.train(make_batch()), exported(engine, tmp_path / str(size))))

    (left, left_weights), (right, right_weights) = results
    assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    assert greatest_difference(left_weights, right_weights) < 1e-5


def test_metrics_describe_the_batch(model_dir: Path) -> None:
    batch, engine = make_batch(), new_engine()
    engine.load_model(model_dir)

    metrics = engine.train(batch)

    assert metrics["global_valid_toks"] == batch.trained_tokens
    assert metrics["num_valid_samples"] == batch.rollouts
    assert metrics["advantages/max"] == max(row.advantage for row in batch.rows)
    assert metrics["advantages/min"] == min(row.advantage for row in batch.rows)
    tokens = [row.advantage for row in batch.rows for _ in range(row.trained_tokens)]
    assert metrics["advantages/mean"] == pytest.approx(np.mean(tokens))
    assert metrics["probs_ratio"] == 1.0
    assert metrics["kl_penalty"] == 0.0
    assert metrics["lr"] == 1e-3
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


@torch.no_grad()
def test_the_gap_to_generation_is_small_when_generation_agrees(model_dir: Path) -> None:
    model, batch = read_model(model_dir), make_batch()
    rows = []
    for row in batch.rows:
        log_probs = np.concatenate([[0.0], log_probs_of(model, row.tokens).numpy()]).astype(np.float32)
        rows.append(dataclasses.replace(row, log_probs=log_probs * row.loss_mask))
    off = rows[0].log_probs.copy()
    off[np.flatnonzero(rows[0].loss_mask)[0]] += 0.25
    engine = new_engine()

    engine.load_model(model_dir)
    agreeing = engine.train(dataclasses.replace(batch, rows=tuple(rows)))
    engine.load_model(model_dir)
    rows[0] = dataclasses.replace(rows[0], log_probs=off)
    one_off = engine.train(dataclasses.replace(batch, rows=tuple(rows)))

    assert agreeing["logprob_gap_max"] <= 1e-5
    assert one_off["logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)
    assert one_off["logprob_gap_mean"] == pytest.approx(0.25 / batch.trained_tokens, abs=1e-5)


def test_the_kl_term_looks_back_at_version_0(model_dir: Path) -> None:
    engine = new_engine(lr=1e-2)
    engine.load_model(model_dir)

    penalties = [engine.train(make_batch(step))["kl_penalty"] for step in range(3)]

    assert penalties[0] == 0.0
    assert 0 < penalties[1] < penalties[2]


def test_without_advantages_only_the_kl_term_acts(model_dir: Path, tmp_path: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    start = exported(engine, tmp_path / "start")

    metrics = engine.train(with_advantage(make_batch(), 0.0))

    assert metrics["loss"] == 0.0
    assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-7)
    assert engine.version == 1
    assert greatest_difference(start, exported(engine, tmp_path / "end")) <= 1e-3


def test_without_advantages_and_kl_nothing_moves(model_dir: Path, tmp_path: Path) -> None:
    engine = new_engine(LossConfig(reference_policy_kl_penalty=0.0))
    engine.load_model(model_dir)
    start = exported(engine, tmp_path / "start")

    engine.train(with_advantage(make_batch(), 0.0))

    assert differing(start, exported(engine, tmp_path / "end")) == []


def test_positive_advantages_make_the_rows_likelier(model_dir: Path) -> None:
    batch, engine = with_advantage(make_batch(), 1.0), new_engine(LossConfig(reference_policy_kl_penalty=0.0))
    engine.load_model(model_dir)

    ratios = [engine.train(batch)["sampling_importance_ratio"] for _ in range(3)]

    assert ratios[0] < ratios[1] < ratios[2]


def test_the_rate_warms_up_linearly(model_dir: Path) -> None:
    engine = new_engine(lr=4e-3, lr_warmup_steps=4)
    engine.load_model(model_dir)

    rates = [engine.train(make_batch())["lr"] for _ in range(5)]

    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])


def test_a_batch_without_sampled_tokens_is_refused(model_dir: Path, tmp_path: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    row = make_batch().rows[0]
    masked = dataclasses.replace(row, loss_mask=row.loss_mask * 0, log_probs=row.log_probs * 0)
    start = exported(engine, tmp_path / "start")

    with pytest.raises(EmptyBatch, match="run r1, step 5, has 1 rows but no sampled token"):
        engine.train(TrainingBatch("r1", 5, (masked,)))

    assert engine.version == 0
    assert differing(start, exported(engine, tmp_path / "end")) == []


def test_a_row_over_the_limit_is_named(model_dir: Path) -> None:
    engine = new_engine(max_row_tokens=20)
    engine.load_model(model_dir)
    row = make_row(np.random.default_rng(0), "r/step-0/group-0/rollout-1", 3, length=21, advantage=1.0)

    with pytest.raises(
        RowTooLong, match="rollout r/step-0/group-0/rollout-1, segment 3, has 21 tokens; the limit is 20"
    ):
        engine.train(TrainingBatch("run", 0, (row,)))


def test_tokens_of_another_vocabulary_are_refused(model_dir: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    row = make_batch().rows[0]
    foreign = dataclasses.replace(row, tokens=row.tokens + np.int32(1000))

    with pytest.raises(TrainingError, match="outside the model's vocabulary of 96"):
        engine.train(TrainingBatch("run", 0, (foreign,)))


def test_a_step_that_is_not_finite_leaves_the_weights(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    start = exported(engine, tmp_path / "start")
    gradients = engine_module.gradients

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "gradients", lambda *args: gradients(*args) | {"loss": math.nan})
        with pytest.raises(NonFiniteStep, match="weights of version 0 are unchanged"):
            engine.train(make_batch())

    assert differing(start, exported(engine, tmp_path / "end")) == []
    fresh = new_engine()
    fresh.load_model(model_dir)
    assert engine.train(make_batch()) == fresh.train(make_batch())


def test_an_engine_without_weights_says_so() -> None:
    with pytest.raises(TrainingError, match="load_model or load first"):
        new_engine().train(make_batch())
