"""Steps that are not applied: cancelled, not finite, or too far from vLLM. The engine stays as it was, bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activities.training.batch import TrainingBatch
from activities.training.errors import EmptyBatch, LogProbGap, NonFiniteStep
from activities.training.megatron import faults
from activities.training.megatron.engine import Engine
from activities.training.watch import StepCancelled
from configs.grpo import LossConfig
from tests.training.samples import agreeing, differing, make_batch, new_engine, off_by, state_of, steady, write_model

LOSS = LossConfig(reference_policy_kl_penalty=0.1)
CORRECTED = LossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
FILTER = 1.65
PHASES = ("previous", "reference", "gradient")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


class Recorder:
    """Remembers what it was told, and cancels at one place."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self._stop_at = stop_at

    def reached(self, phase: str, micro_batch: int, micro_batches: int) -> None:
        self.told.append((phase, micro_batch, micro_batches))
        if (phase, micro_batch) == self._stop_at:
            raise StepCancelled


def trained_engine(model_dir: Path, loss: LossConfig = LOSS, **options: Any) -> Engine:
    """An engine at version 1, so that there is optimizer state to lose."""
    engine = new_engine(loss, **options)
    engine.load_model(model_dir)
    engine.train(make_batch(0))
    return engine


def with_advantage(batch: TrainingBatch, row: int, advantage: float) -> TrainingBatch:
    rows = list(batch.rows)
    rows[row] = dataclasses.replace(rows[row], advantage=advantage)
    return dataclasses.replace(batch, rows=tuple(rows))


def check_untouched(
    engine: Engine, twin: Engine, fails: Callable[[], object], expected: type[Exception], match: str | None = None
) -> str:
    """The step raises and leaves no trace: the next one equals that of a twin which never saw it. Returns the error."""
    before, version = state_of(engine), engine.version
    with pytest.raises(expected, match=match) as caught:
        fails()
    assert engine.version == version
    assert differing(before, state_of(engine)) == []
    assert steady(engine.train(make_batch(2))) == steady(twin.train(make_batch(2)))
    assert differing(state_of(engine), state_of(twin)) == []
    return str(caught.value)


def test_the_watch_hears_of_every_micro_batch_of_every_pass(model_dir: Path) -> None:
    engine, watch = trained_engine(model_dir, seq_logprob_error_threshold=FILTER), Recorder()

    engine.train(make_batch(1), watch)

    assert watch.told == [(phase, i, 2) for phase in PHASES for i in range(2)]


def test_passes_that_nothing_needs_are_not_made(model_dir: Path) -> None:
    engine, watch = trained_engine(model_dir, LossConfig(reference_policy_kl_penalty=0.0)), Recorder()

    engine.train(make_batch(1), watch)

    assert watch.told == [("gradient", 0, 2), ("gradient", 1, 2)]


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_step_leaves_no_trace(model_dir: Path, phase: str, micro_batch: int) -> None:
    engine, twin = (trained_engine(model_dir, seq_logprob_error_threshold=FILTER) for _ in range(2))
    watch = Recorder((phase, micro_batch))

    check_untouched(engine, twin, lambda: engine.train(make_batch(1), watch), StepCancelled)

    assert watch.told[-1] == (phase, micro_batch, 2)


def test_a_loss_that_is_not_finite_names_its_row(model_dir: Path) -> None:
    """A recorded log-probability of -88 gives the row an importance weight of e^80 or so, and an endless loss."""
    engine, twin = (trained_engine(model_dir, CORRECTED) for _ in range(2))
    bad = with_advantage(off_by(make_batch(1), 3, -83.0), 3, 1e9)

    message = check_untouched(engine, twin, lambda: engine.train(bad), NonFiniteStep)

    assert "Step 1 of run run gives the loss" in message
    assert "It comes from rollout run/step-1/group-0/rollout-1, segment 1, advantage 1e+09." in message
    assert "The weights of version 1 are unchanged" in message


@pytest.mark.parametrize("tokens", [131_072, 8])
def test_a_gradient_that_is_not_finite_names_its_rows(model_dir: Path, tokens: int) -> None:
    """Finite advantages so large that the norm of the gradient overflows, in passes of four rows and of one."""
    engine, twin = (trained_engine(model_dir, train_micro_batch_tokens=tokens) for _ in range(2))
    bad = with_advantage(with_advantage(make_batch(1), 1, 1e30), 4, -1e30)

    message = check_untouched(engine, twin, lambda: engine.train(bad), NonFiniteStep)

    assert "gives a finite loss, but the gradient norm" in message
    assert (
        "It comes from rollout run/step-1/group-0/rollout-0, segment 1, advantage 1e+30; "
        "rollout run/step-1/group-0/rollout-2, segment 0, advantage -1e+30."
    ) in message


def test_the_search_for_a_bad_gradient_is_bounded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watch = trained_engine(model_dir), Recorder()
    bad = dataclasses.replace(
        make_batch(1), rows=tuple(dataclasses.replace(row, advantage=1e30) for row in make_batch(1).rows)
    )
    monkeypatch.setattr(faults, "MAX_NAMED_ROWS", 3)

    with pytest.raises(NonFiniteStep) as caught:
        engine.train(bad, watch)

    assert str(caught.value).count("rollout run/step-1/") == 3
    searched = watch.told[4:]
    assert searched == [(phase, 0, 1) for _ in range(3) for phase in ("reference", "gradient")]


def test_a_gradient_that_no_row_explains_says_so() -> None:
    with pytest.raises(NonFiniteStep, match=r"gradient norm inf\. No single row does this alone"):
        faults.check_norm(make_batch(), 4, float("inf"), list)


def test_broken_weights_name_a_few_rows_and_count_the_rest(model_dir: Path) -> None:
    engine = trained_engine(model_dir)
    policy: Any = engine._policy
    with torch.no_grad():
        policy.model.decoder.final_layernorm.weight.fill_(float("nan"))

    with pytest.raises(NonFiniteStep, match=r"gives the loss nan\. It comes from rollout .*, and 2 more\."):
        engine.train(make_batch(1))

    assert engine.version == 1


def test_a_wide_gap_to_vllm_stops_the_step(model_dir: Path) -> None:
    engine, twin = (trained_engine(model_dir, max_logprob_gap=4.0) for _ in range(2))
    bad = off_by(agreeing(make_batch(1), engine), 5, -6.5)
    token = int(np.flatnonzero(bad.rows[5].loss_mask)[0])

    message = check_untouched(engine, twin, lambda: engine.train(bad), LogProbGap, "Step 1 of run run is not applied")

    own = float(agreeing(make_batch(1), new_twin(model_dir)).rows[5].log_probs[token])
    assert (
        f"1 of its rows hold a token whose log-probability differs by more than training.max_logprob_gap (4) between "
        f"vLLM and trainer. The widest gaps: rollout run/step-1/group-0/rollout-2, segment 1, token {token}: vLLM "
        f"{own - 6.5:.4f}, trainer {own:.4f}."
    ) in message
    for cause in ("chat template", "stale KV cache", "bad export", "temperature", "version 1 are unchanged"):
        assert cause in message


def new_twin(model_dir: Path) -> Engine:
    return trained_engine(model_dir, max_logprob_gap=4.0)


def test_only_the_widest_gaps_are_named(model_dir: Path) -> None:
    engine = trained_engine(model_dir)
    close = agreeing(make_batch(1), engine)
    for row in range(7):
        close = off_by(close, row, -(row + 1) / 4)
    strict = new_engine(LOSS, max_logprob_gap=0.1)
    strict.load_model(model_dir)

    with pytest.raises(LogProbGap, match="7 of its rows") as caught:
        strict.train(close)

    assert str(caught.value).count("rollout run/step-1/") == faults.MAX_NAMED_ROWS
    assert str(caught.value).index("rollout-3, segment 0") < str(caught.value).index("rollout-2, segment 1")


def test_rows_above_the_threshold_do_not_train(model_dir: Path) -> None:
    batch, engine = make_batch(0), new_engine(LOSS, seq_logprob_error_threshold=FILTER)
    engine.load_model(model_dir)
    errors = [
        float(np.exp(np.abs(row.log_probs - own))[row.loss_mask > 0].mean())
        for row, own in zip(batch.rows, engine.log_probabilities(batch), strict=True)
    ]
    dropped = [i for i, error in enumerate(errors) if error > FILTER]
    assert dropped
    plain = new_engine(LOSS)
    plain.load_model(model_dir)
    rows = [
        dataclasses.replace(row, loss_mask=row.loss_mask * 0, log_probs=row.log_probs * 0) if i in dropped else row
        for i, row in enumerate(batch.rows)
    ]

    metrics = engine.train(batch)
    by_hand = plain.train(dataclasses.replace(batch, rows=tuple(rows)))

    assert differing(state_of(engine), state_of(plain)) == []
    assert metrics["loss"] == by_hand["loss"]
    assert metrics["num_masked_seqs_by_logprob_error"] == len(dropped)
    assert metrics["masked_correct_pct"] == sum(batch.rows[i].advantage > 0 for i in dropped) / len(dropped)
    assert metrics["global_valid_seqs"] == 7 - len(dropped)
    assert metrics["consumed_rollouts"] == batch.rollouts
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(max(errors), rel=1e-5)
    assert metrics["mean_seq_mult_prob_error"] == pytest.approx(np.mean(errors), rel=1e-5)
    kept = [error for error in errors if error <= FILTER]
    assert metrics["max_seq_mult_prob_error_after_mask"] == pytest.approx(max(kept), rel=1e-5)
    assert metrics["min_seq_mult_prob_error_after_mask"] == pytest.approx(min(kept), rel=1e-5)


def test_a_filter_that_leaves_nothing_refuses_the_step(model_dir: Path) -> None:
    engine, twin = (trained_engine(model_dir, seq_logprob_error_threshold=FILTER) for _ in range(2))
    foreign = make_batch(1)
    for row in range(7):
        foreign = off_by(foreign, row, -8.0)

    message = check_untouched(engine, twin, lambda: engine.train(foreign), EmptyBatch)

    assert "all 7 rows that would train are above grpo.seq_logprob_error_threshold" in message
