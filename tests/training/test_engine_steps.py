"""Optimizer steps: equal to plain PyTorch, the same every time, neutral to how rows are packed."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.training import microbatches
from activities.training.batch import TrainingBatch, placeholder
from activities.training.errors import EmptyBatch, RowTooLong, TrainingError
from activities.training.loss import grpo_loss
from configs.grpo import LossConfig
from tests.training.samples import (
    agreeing,
    differing,
    exported,
    greatest_difference,
    log_probs_of,
    make_batch,
    make_row,
    new_engine,
    off_by,
    read_model,
    state_of,
    steady,
    write_model,
)

METRICS = {
    *("loss", "grad_norm", "lr", "wd", "global_valid_toks", "global_valid_seqs", "num_valid_samples"),
    *("total_num_tokens", "advantages/mean", "advantages/max", "advantages/min", "probs_ratio", "probs_ratio_min"),
    *("probs_ratio_max", "probs_ratio_clamped", "probs_ratio_clamped_min", "probs_ratio_clamped_max", "kl_penalty"),
    *("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "approx_entropy"),
    *("sampling_importance_ratio", "is_oob_ratio", "positive_nll_loss", "max_seq_mult_prob_error"),
    *("mean_seq_mult_prob_error", "min_seq_mult_prob_error", "max_seq_mult_prob_error_after_mask"),
    *("mean_seq_mult_prob_error_after_mask", "min_seq_mult_prob_error_after_mask", "masked_correct_pct"),
    *("num_masked_seqs_by_logprob_error", "logprob_gap_max", "logprob_gap_mean", "logprob_gap_kl"),
    *("consumed_rollouts", "padding_rows", "micro_batches", "timing/policy_and_reference_logprobs"),
    *("timing/training_prep", "timing/gradient", "timing/optimizer"),
}


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
            terms = grpo_loss(
                curr=curr[None],
                prev=curr.detach()[None],
                generation=generation[None],
                reference=fixed[None],
                advantages=advantage[None, None],
                mask=mask[None],
                weights=mask[None],
                config=loss,
            )
            total = total + terms.loss
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
        metrics = [steady(engine.train(make_batch(step))) for step in range(3)]
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
        metrics = steady(engine.train(make_batch()))
        assert metrics.pop("padding_rows") == -7 % size
        assert metrics.pop("micro_batches") == math.ceil(7 / size)
        results.append((metrics, exported(engine, tmp_path / str(size))))

    (left, left_weights), (right, right_weights) = results
    assert left == pytest.approx(right, rel=1e-4, abs=1e-6)
    assert greatest_difference(left_weights, right_weights) < 1e-5


def test_passes_of_padding_alone_change_nothing_bit_for_bit(model_dir: Path) -> None:
    """Rows so long that each is a pass of its own; then quanta of 4 add a pass of one padding row, quanta of 1 none."""
    results = []
    for size in (1, 4):
        engine = new_engine(train_micro_batch_size=size, train_micro_batch_tokens=8)
        engine.load_model(model_dir)
        metrics = steady(engine.train(make_batch()))
        assert metrics.pop("padding_rows") == -7 % size
        assert metrics.pop("micro_batches") == (7 if size == 1 else 8)
        results.append((metrics, state_of(engine)))

    assert results[0][0] == results[1][0]
    assert differing(results[0][1], results[1][1]) == []


def test_padding_rows_change_nothing_bit_for_bit(model_dir: Path) -> None:
    """Seven rows in one pass: a quantum of eight adds a padding row, of seven none."""
    results = []
    for size in (7, 8):
        engine = new_engine(train_micro_batch_size=size)
        engine.load_model(model_dir)
        metrics = steady(engine.train(make_batch()))
        assert metrics.pop("padding_rows") == size - 7
        results.append((metrics, state_of(engine)))

    assert results[0][0] == results[1][0]
    assert differing(results[0][1], results[1][1]) == []


def test_what_padding_holds_does_not_matter_bit_for_bit(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for token in (0, 17):
        monkeypatch.setattr(microbatches, "PADDING_TOKEN", token)
        engine = new_engine(train_micro_batch_size=4, train_micro_batch_tokens=64)
        engine.load_model(model_dir)
        results.append((steady(engine.train(make_batch())), state_of(engine)))

    assert results[0][0] == results[1][0]
    assert differing(results[0][1], results[1][1]) == []


def test_metrics_describe_the_batch(model_dir: Path) -> None:
    made, engine = make_batch(), new_engine(weight_decay=0.01)
    batch = dataclasses.replace(made, rows=(*made.rows, placeholder("run/step-0/group-1/rollout-0")))
    engine.load_model(model_dir)

    metrics = engine.train(batch)

    assert metrics["global_valid_toks"] == batch.trained_tokens
    assert metrics["global_valid_seqs"] == 7
    assert metrics["num_valid_samples"] == batch.rollouts - 1
    assert metrics["consumed_rollouts"] == batch.rollouts == 5
    assert metrics["total_num_tokens"] == sum(len(row.tokens) for row in batch.rows)
    assert metrics["padding_rows"] == 0
    assert metrics["micro_batches"] == 2
    assert metrics["advantages/max"] == max(row.advantage for row in batch.rows)
    assert metrics["advantages/min"] == min(row.advantage for row in batch.rows)
    tokens = [row.advantage for row in batch.rows for _ in range(row.trained_tokens)]
    assert metrics["advantages/mean"] == pytest.approx(np.mean(tokens))
    assert metrics["probs_ratio"] == metrics["probs_ratio_min"] == metrics["probs_ratio_clamped_max"] == 1.0
    assert metrics["kl_penalty"] == 0.0
    assert metrics["lr"] == 1e-3
    assert metrics["wd"] == 0.01
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    "options",
    [
        {"reference_policy_kl_penalty": 0.0},
        {"use_cispo": True},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
    ],
)
def test_every_step_has_all_metrics(model_dir: Path, options: dict[str, Any]) -> None:
    engine = new_engine(LossConfig(**options))
    engine.load_model(model_dir)

    assert engine.train(make_batch()).keys() == METRICS


def test_metrics_of_absurd_log_probabilities_are_numbers(model_dir: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    metrics = engine.train(off_by(agreeing(make_batch(), engine), 0, -1000.0))
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["token_mult_prob_error"] == metrics["max_seq_mult_prob_error"] == sys.float_info.max


def test_the_gap_to_generation_is_small_when_generation_agrees(model_dir: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    batch = agreeing(make_batch(), engine)

    same = engine.train(batch)
    engine.load_model(model_dir)
    one_off = engine.train(off_by(batch, 0, 0.25))

    assert same["logprob_gap_max"] <= 1e-5
    assert one_off["logprob_gap_max"] == pytest.approx(0.25, abs=1e-5)
    assert one_off["logprob_gap_mean"] == pytest.approx(0.25 / batch.trained_tokens, abs=1e-5)
    assert one_off["max_seq_mult_prob_error"] == pytest.approx(
        1 + (math.exp(0.25) - 1) / batch.rows[0].trained_tokens, abs=1e-5
    )
    assert one_off["min_seq_mult_prob_error_after_mask"] == pytest.approx(1.0, abs=1e-5)


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


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}, {"dtype": "bfloat16"}], ids=str)
def test_weight_decay_acts_on_matrices_only(model_dir: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    engine = new_engine(LossConfig(reference_policy_kl_penalty=0.0), lr=0.5, weight_decay=0.5, **options)
    engine.load_model(model_dir)
    start = exported(engine, tmp_path / "start")

    metrics = engine.train(with_advantage(make_batch(), 0.0))

    end = exported(engine, tmp_path / "end")
    assert metrics["wd"] == 0.5
    assert set(differing(start, end)) == {name for name, value in start.items() if value.dim() > 1}
    for name in differing(start, end):
        torch.testing.assert_close(end[name].float(), 0.75 * start[name].float(), rtol=1e-2, atol=0)


def test_positive_advantages_make_the_rows_likelier(model_dir: Path) -> None:
    batch, engine = with_advantage(make_batch(), 1.0), new_engine(LossConfig(reference_policy_kl_penalty=0.0))
    engine.load_model(model_dir)

    ratios = [engine.train(batch)["sampling_importance_ratio"] for _ in range(3)]

    assert ratios[0] < ratios[1] < ratios[2]


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
    row = make_row(np.random.default_rng(0), "r/step-0/group-0/rollout-1", 0, length=21, advantage=1.0)

    with pytest.raises(
        RowTooLong, match="rollout r/step-0/group-0/rollout-1, segment 0, has 21 tokens; the limit is 20"
    ):
        engine.train(TrainingBatch("run", 0, (row,)))


def test_tokens_of_another_vocabulary_are_refused(model_dir: Path) -> None:
    engine = new_engine()
    engine.load_model(model_dir)
    row = make_batch().rows[0]
    foreign = dataclasses.replace(row, tokens=row.tokens + np.int32(1000))

    with pytest.raises(TrainingError, match="outside the model's vocabulary of 96"):
        engine.train(TrainingBatch("run", 0, (foreign,)))


def test_an_engine_without_weights_says_so() -> None:
    with pytest.raises(TrainingError, match="load_model or load first"):
        new_engine().train(make_batch())
