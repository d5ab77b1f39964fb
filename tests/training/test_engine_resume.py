"""Checkpoints: training after a resume is the training that would have been, bit for bit."""

import errno
import os
from pathlib import Path
from threading import Thread

import pytest

from activities.training.errors import CheckpointError
from activities.training.megatron.engine import Engine
from tests.training.samples import differing, exported, make_batch, new_engine, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


@pytest.fixture(params=[False, True], ids=["plain-optimizer", "distributed-optimizer"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Engine:
    engine = new_engine(use_distributed_optimizer=request.param, weight_decay=0.01, lr_warmup_steps=3)
    engine.load_model(model_dir)
    return engine


def test_a_resumed_run_is_bit_identical(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    for step in range(2):
        engine.train(make_batch(step))
    engine.save(tmp_path / "checkpoint")
    straight = [engine.train(make_batch(step)) for step in (2, 3)]
    straight_weights = exported(engine, tmp_path / "straight")

    engine.load(tmp_path / "checkpoint", model_dir)
    assert engine.version == 2
    resumed = [engine.train(make_batch(step)) for step in (2, 3)]

    assert resumed == straight
    assert differing(straight_weights, exported(engine, tmp_path / "resumed")) == []
    assert engine.version == 4


def test_version_0_can_be_saved_and_resumed(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    engine.save(tmp_path / "checkpoint")
    straight = engine.train(make_batch())

    engine.load(tmp_path / "checkpoint", model_dir)

    assert engine.version == 0
    assert engine.train(make_batch()) == straight


def test_a_checkpoint_can_be_written_and_read_in_another_thread(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    def work() -> None:
        engine.train(make_batch())
        engine.save(tmp_path / "checkpoint")
        engine.load(tmp_path / "checkpoint", model_dir)

    thread = Thread(target=work)
    thread.start()
    thread.join(timeout=60)

    assert engine.version == 1


def test_a_full_disk_is_named_and_leaves_no_checkpoint(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            engine.save(tmp_path / "checkpoint")

    assert not (tmp_path / "checkpoint").exists()
    engine.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_folder_without_a_checkpoint_is_named(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}"):
        engine.load(tmp_path, model_dir)


def test_a_damaged_checkpoint_is_named(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    engine.save(tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load(tmp_path / "checkpoint", model_dir)


def test_a_checkpoint_of_another_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.save(tmp_path / "checkpoint")
    other = write_model(tmp_path / "other", "qwen2-untied")

    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load(tmp_path / "checkpoint", other)
