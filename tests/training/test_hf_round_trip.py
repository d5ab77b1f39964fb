"""Weights pass unchanged through the trainer, and it computes what Transformers computes, on one rank and on two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import PreTrainedModel

from activities.files import file_digest
from tests.training.layouts import carry_out, job, prepare, results
from tests.training.run_steps import Action, Job, Order, export, logits
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

SHARDED = {"tensor": {"tensor_model_parallel_size": 2}, "pipeline": {"pipeline_model_parallel_size": 2}}
# Between them: tied and not, with biases, with norms of heads, and with neither.
SHARDED_MODELS = ("qwen3-tied", "qwen2-untied", "llama3-rope")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind, and a batch."""
    prepare()
    folder = tmp_path_factory.mktemp("round-trip")
    for kind in MODELS:
        write_model(folder / kind, kind)
    (folder / "batch").write_bytes(make_batch().to_bytes())
    return folder


@pytest.fixture(scope="module", params=SHARDED)
def sharded(request: pytest.FixtureRequest, folder: Path) -> dict[str, Job]:
    """Each of these kinds exported by two ranks before and after a step, with what they compute for both versions."""
    layout, batch = request.param, folder / "batch"
    look = Action(do="logits" if layout == "tensor" else "log_probs", path=batch)  # no stage has both ends of a model
    jobs = {}
    for kind in SHARDED_MODELS:
        place = folder / f"{kind}-{layout}"
        actions = [
            Action(do="load_model"),
            Action(do="export", path=folder / f"{kind}-{layout}-0"),
            Action(do="train", path=batch),
            Action(do="export", path=folder / f"{kind}-{layout}-1", shard_size_bytes=20_000),
            Action(do="load_model"),
            look,
            Action(do="load_model", path=folder / f"{kind}-{layout}-1"),
            look,
            Action(
                do="export",
                path=folder / f"{kind}-{layout}-2",
                shard_size_bytes=20_000,
                full_disk_on=0,
                files_before=1,
                fails=True,
            ),
        ]
        jobs[kind] = job(place, folder / kind, SHARDED[layout], actions, {})
    carry_out(Order(ranks=2, log=folder / layout, jobs=list(jobs.values())))
    return jobs


def gap_to_transformers(found: Any, model: PreTrainedModel, tokens: NDArray[np.int32]) -> float:
    """Largest difference of any logit of a row."""
    with torch.no_grad():
        known = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return (torch.as_tensor(found) - known).abs().max().item()


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_of_version_0_is_the_model(folder: Path, tmp_path: Path, kind: str) -> None:
    engine = new_engine()
    engine.load_model(folder / kind)

    engine.export(tmp_path / "export")

    assert differing(weights_of(folder / kind), weights_of(tmp_path / "export")) == []
    assert {path.name for path in (tmp_path / "export").iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers_before_and_after_a_step(folder: Path, tmp_path: Path, kind: str) -> None:
    engine = new_engine()
    engine.load_model(folder / kind)
    reference = read_model(folder / kind)
    for row in make_batch().rows:
        assert gap_to_transformers(logits(engine, row.tokens), reference, row.tokens) <= 1e-5

    engine.train(make_batch())
    engine.export(tmp_path / "export")

    trained = read_model(tmp_path / "export")
    for row in make_batch().rows:
        assert gap_to_transformers(logits(engine, row.tokens), trained, row.tokens) <= 1e-5


@pytest.mark.parametrize("kind", SHARDED_MODELS)
def test_two_ranks_export_version_0_as_one_rank_does_byte_for_byte(
    folder: Path, sharded: dict[str, Job], kind: str, tmp_path: Path
) -> None:
    engine = new_engine()
    engine.load_model(folder / kind)
    engine.export(tmp_path / "export")

    exported = exports(sharded[kind])[0]

    assert sorted(path.name for path in exported.iterdir()) == sorted(
        path.name for path in (tmp_path / "export").iterdir()
    )
    for path in exported.iterdir():
        assert file_digest(path) == file_digest(tmp_path / "export" / path.name)


@pytest.mark.parametrize("kind", SHARDED_MODELS)
def test_two_ranks_compute_what_transformers_computes_before_and_after_a_step(
    folder: Path, sharded: dict[str, Job], kind: str
) -> None:
    looks = [i for i, action in enumerate(sharded[kind].actions) if action.do in ("logits", "log_probs")]
    models = [read_model(folder / kind), read_model(exports(sharded[kind])[1])]
    for of_rank in results(sharded[kind]):
        for look, model in zip(looks, models, strict=True):
            for found, row in zip(of_rank[look], make_batch().rows, strict=True):
                if sharded[kind].actions[look].do == "logits":
                    assert gap_to_transformers(found, model, row.tokens) <= 1e-5
                else:
                    with torch.no_grad():
                        known = log_probs_of(model, row.tokens)
                    assert found[1:] == pytest.approx(known.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", SHARDED_MODELS)
def test_an_export_in_shards_holds_little_in_memory_and_the_same_tensors(
    folder: Path, sharded: dict[str, Job], kind: str, tmp_path: Path
) -> None:
    """The sharded export of two ranks, read by one and written as one file, has the same tensors."""
    exported = exports(sharded[kind])[1]
    index = json.loads((exported / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    tensors = {name: value for file in files for name, value in load_file(exported / file).items()}
    largest = max(value.nbytes for value in tensors.values())

    engine = new_engine()
    engine.load_model(exported)
    engine.export(tmp_path / "one-file")

    whole = load_file(tmp_path / "one-file" / "model.safetensors")
    assert differing(whole, tensors) == []
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert {name: file for file in files for name in load_file(exported / file)} == index["weight_map"]
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) >= index["metadata"]["total_size"] / (20_000 + largest)
    assert all(sum(value.nbytes for value in load_file(exported / file).values()) <= 20_000 for file in files)
    held = [of_rank[3] for of_rank in results(sharded[kind])]
    assert 0 < held[0]["pending_size_bytes"] <= 20_000
    assert 0 < held[0]["gathered_tensors"] <= 4 < len(tensors)  # those of one parameter, and the one before
    assert held[1] == {"pending_size_bytes": 0, "gathered_tensors": 0}


@pytest.mark.parametrize("kind", SHARDED_MODELS)
def test_a_disk_that_is_full_in_the_midst_of_an_export_fails_it_on_all_ranks(
    sharded: dict[str, Job], kind: str
) -> None:
    for of_rank in results(sharded[kind]):
        assert of_rank[-1] == "OSError: rank 0: OSError: [Errno 28] No space left on device"
    place = exports(sharded[kind])[-1]
    assert [path.name for path in place.parent.iterdir() if place.name in path.name] == []


def exports(done: Job) -> list[Path]:
    return [action.path for action in done.actions if action.do == "export" and action.path is not None]


def test_a_tensor_that_is_larger_than_a_shard_goes_to_disk_at_once(folder: Path, tmp_path: Path) -> None:
    engine = new_engine()
    engine.load_model(folder / "qwen2-untied")

    held = export(engine, tmp_path / "export", shard_size_bytes=1)

    index = json.loads((tmp_path / "export" / INDEX).read_text())
    assert held.pending_size_bytes == 0
    assert len(set(index["weight_map"].values())) == len(index["weight_map"])
    assert differing(weights_of(folder / "qwen2-untied"), weights_of(tmp_path / "export")) == []


def test_an_export_names_its_precision(folder: Path, tmp_path: Path) -> None:
    engine = new_engine(dtype="bfloat16")
    engine.load_model(folder / "qwen3-tied")
    engine.train(make_batch())

    engine.export(tmp_path / "export")

    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(tmp_path / "export" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_that_exists_with_the_same_content_is_not_touched(folder: Path, tmp_path: Path) -> None:
    engine = new_engine()
    engine.load_model(folder / "qwen3-tied")
    engine.export(tmp_path / "export")
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "export").iterdir()}

    engine.export(tmp_path / "export")

    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "export").iterdir()}
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("spoil", ["missing", "shorter", "other bytes", "left over"])
def test_an_export_that_differs_is_replaced_and_a_reader_of_the_old_one_reads_on(
    folder: Path, tmp_path: Path, spoil: str
) -> None:
    engine = new_engine()
    engine.load_model(folder / "qwen3-tied")
    engine.export(tmp_path / "export")
    weights = tmp_path / "export" / "model.safetensors"
    content = weights.read_bytes()
    if spoil == "left over":
        (tmp_path / "export" / "left-over").touch()
    elif spoil == "missing":
        weights.rename(tmp_path / "export" / "left-over")
    else:
        weights.write_bytes(content[:-1] if spoil == "shorter" else content[:-1] + bytes([content[-1] ^ 1]))
    old = next(path for path in (tmp_path / "export").iterdir() if path.name in ("left-over", "model.safetensors"))
    known = old.read_bytes()

    with old.open("rb") as reader:
        engine.export(tmp_path / "export")

        assert reader.read() == known
    assert weights.read_bytes() == content
    assert not (tmp_path / "export" / "left-over").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
