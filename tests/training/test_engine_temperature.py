"""The trainer's log-probabilities are those of logits / temperature, as vLLM records them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.samples import agreeing, exact_model, log_probs_of, make_batch, new_engine, state_of, write_model


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-untied"])
def test_log_probabilities_equal_transformers(tmp_path: Path, kind: str, temperature: float) -> None:
    folder = write_model(tmp_path / "model", kind)
    engine = new_engine(temperature=temperature)
    engine.load_model(folder)
    batch, model, before = make_batch(), exact_model(folder), state_of(engine)

    found = engine.log_probabilities(batch)

    for row, values in zip(batch.rows, found, strict=True):
        assert values[0] == 0
        np.testing.assert_allclose(values[1:], log_probs_of(model, row.tokens, temperature).numpy(), atol=5e-6)
    assert engine.version == 0
    assert all(torch.equal(value, before[name]) for name, value in state_of(engine).items())


def test_a_rollout_at_another_temperature_shows_as_a_gap(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3-tied")
    cool, plain = new_engine(temperature=0.6), new_engine()
    cool.load_model(folder)
    plain.load_model(folder)
    batch = agreeing(make_batch(), cool)

    assert cool.train(batch)["logprob_gap_max"] < 1e-5
    assert plain.train(batch)["logprob_gap_max"] > 0.1
