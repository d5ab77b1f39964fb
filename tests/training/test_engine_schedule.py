"""The learning rate as a function of the version, the optimizer's own count of steps, and masters of bf16 weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import TrainingBatch
from activities.training.megatron.engine import Engine
from activities.training.megatron.optimizer import torch_optimizers
from activities.training.megatron.schedule import learning_rate
from configs.grpo import LossConfig
from configs.training import TrainingConfig
from tests.training.samples import make_batch, new_engine, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


@pytest.mark.parametrize(
    ("style", "rates"),
    [
        ("constant", [2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]),
        ("linear", [2.0, 4.0, 4.0, 3.25, 2.5, 1.75, 1.0, 1.0]),
        ("cosine", [2.0, 4.0, 4.0, 1 + 1.5 * (1 + math.sqrt(0.5)), 2.5, 1 + 1.5 * (1 - math.sqrt(0.5)), 1.0, 1.0]),
    ],
)
def test_rates_of_the_first_steps(style: Any, rates: list[float]) -> None:
    """Two steps of warm-up, then down until step 6."""
    decay = {} if style == "constant" else {"lr_decay_steps": 6, "min_lr": 1.0}
    training = TrainingConfig(lr=4.0, lr_warmup_steps=2, lr_decay_style=style, **decay)

    assert [learning_rate(training, version) for version in range(8)] == pytest.approx(rates, rel=1e-12)


@given(
    style=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 50),
    decay=st.integers(1, 200),
    lowest=st.floats(0.0, 1.0),
)
def test_the_rate_rises_to_its_peak_and_falls_to_its_floor(style: Any, warmup: int, decay: int, lowest: float) -> None:
    training = TrainingConfig(
        lr=1e-3, lr_warmup_steps=warmup, lr_decay_style=style, lr_decay_steps=warmup + decay, min_lr=1e-3 * lowest
    )
    rates = [learning_rate(training, version) for version in range(warmup + decay + 3)]

    assert rates[max(0, warmup - 1)] == max(rates) == 1e-3
    assert rates[warmup + decay :] == pytest.approx([1e-3 * lowest] * 3, abs=1e-18)
    assert all(rate > 0 for rate in rates[: warmup + decay])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def steps_of(engine: Engine) -> set[float]:
    """What Adam counts."""
    policy: Any = engine._policy
    return {
        float(each["step"]) for optimizer in torch_optimizers(policy.optimizer) for each in optimizer.state.values()
    }


def test_the_engine_follows_the_schedule_of_its_version(model_dir: Path) -> None:
    training = {"lr": 4e-3, "lr_warmup_steps": 2, "lr_decay_style": "linear", "lr_decay_steps": 4, "min_lr": 1e-3}
    engine = new_engine(**training)
    engine.load_model(model_dir)

    rates = [engine.train(make_batch(step))["lr"] for step in range(5)]

    assert rates == pytest.approx([2e-3, 4e-3, 4e-3, 2.5e-3, 1e-3])


def test_adam_counts_logical_steps(model_dir: Path) -> None:
    """However many micro-batches a step has, and however many steps were refused."""
    engine = new_engine(train_micro_batch_size=2, max_logprob_gap=50.0)
    engine.load_model(model_dir)
    far: TrainingBatch = make_batch(1)
    far.rows[0].log_probs[far.rows[0].loss_mask > 0] = -90.0

    engine.train(make_batch(0))
    with pytest.raises(Exception, match="max_logprob_gap"):
        engine.train(far)
    engine.train(make_batch(1))

    assert steps_of(engine) == {2.0}
    assert engine.version == 2


@pytest.mark.parametrize("distributed", [False, True])
def test_bf16_weights_have_float32_masters(model_dir: Path, distributed: bool) -> None:
    """Steps far below the resolution of bf16: the weights stand still until the masters have gone far enough."""
    engine = new_engine(
        LossConfig(reference_policy_kl_penalty=0.0),
        dtype="bfloat16",
        lr=2e-6,
        use_distributed_optimizer=distributed,
    )
    engine.load_model(model_dir)
    policy: Any = engine._policy
    norm = policy.model.decoder.final_layernorm.weight  # values near 1, whose neighbours are 2^-8 and 2^-7 away
    start = norm.detach().clone()
    masters = [
        p for optimizer in torch_optimizers(policy.optimizer) for g in optimizer.param_groups for p in g["params"]
    ]
    assert {master.dtype for master in masters} == {torch.float32}
    at_first = [master.detach().clone() for master in masters]

    moved = []
    for _ in range(3):
        engine.train(make_batch(0))
        moved.append(max(float((now - then).abs().max()) for now, then in zip(masters, at_first, strict=True)))

    assert torch.equal(norm, start)
    assert moved == pytest.approx([2e-6, 4e-6, 6e-6], rel=0.2)


def test_bf16_weights_follow_their_masters_in_the_end(model_dir: Path) -> None:
    engine = new_engine(LossConfig(reference_policy_kl_penalty=0.0), dtype="bfloat16", lr=5e-4)
    engine.load_model(model_dir)
    policy: Any = engine._policy
    norm = policy.model.decoder.final_layernorm.weight
    start = norm.detach().clone()

    engine.train(make_batch(0))
    after_one = (norm != start).sum()
    for _ in range(9):
        engine.train(make_batch(0))

    assert after_one < (norm != start).sum()
