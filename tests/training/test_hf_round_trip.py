"""Weights pass unchanged through the trainer, and it computes what Transformers computes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from activities.training.megatron import hf_writer
from activities.training.megatron.cpu_shims import megatron_device
from activities.training.megatron.passes import log_probabilities
from activities.training.microbatches import micro_batches
from tests.training.samples import (
    MODELS,
    differing,
    log_probs_of,
    make_batch,
    new_engine,
    read_model,
    weights_of,
    write_model,
)


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_of_version_0_is_the_model(tmp_path: Path, kind: str) -> None:
    source = write_model(tmp_path / "model", kind)
    engine = new_engine()
    engine.load_model(source)

    engine.export(tmp_path / "export")

    assert differing(weights_of(source), weights_of(tmp_path / "export")) == []
    assert {path.name for path in (tmp_path / "export").iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_log_probabilities_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    source, batch = write_model(tmp_path / "model", kind), make_batch()
    engine = new_engine()
    engine.load_model(source)
    policy = engine._loaded()

    with megatron_device():
        micros = micro_batches(
            batch, rows_per_pass=3, data_parallel_size=1, data_parallel_rank=0, device=torch.device("cpu")
        )
        results = log_probabilities(policy.wrapped, micros)

    rows = iter(sorted(batch.rows, key=lambda row: -len(row.tokens)))
    reference = read_model(source)
    gaps = [
        (line[: len(row.tokens) - 1] - log_probs_of(reference, row.tokens)).abs().max().item()
        for result in results
        if result is not None
        for line, row in zip(result, rows, strict=False)  # the last one has padding rows too
    ]
    assert len(gaps) >= len(batch.rows) - 1
    assert max(gaps) <= 1e-5


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_writer, "MAX_SHARD_SIZE_BYTES", 20_000)
    source = write_model(tmp_path / "model", "qwen2-untied")
    engine = new_engine()
    engine.load_model(source)

    engine.export(tmp_path / "export")

    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(
        value.nbytes for file in files for value in load_file(tmp_path / "export" / file).values()
    )
    engine.load_model(tmp_path / "export")
    engine.export(tmp_path / "again")
    assert differing(weights_of(source), weights_of(tmp_path / "again")) == []


def test_an_export_names_its_precision(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen3-tied")
    engine = new_engine(dtype="bfloat16")
    engine.load_model(source)
    engine.train(make_batch())

    engine.export(tmp_path / "export")

    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(tmp_path / "export" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_replaces_an_older_folder(tmp_path: Path) -> None:
    engine = new_engine()
    engine.load_model(write_model(tmp_path / "model", "qwen3-tied"))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "left-over").touch()

    engine.export(tmp_path / "export")

    assert not (tmp_path / "export" / "left-over").exists()
