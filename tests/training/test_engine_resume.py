"""Checkpoints: training after a resume is the training that would have been, bit for bit."""

import errno
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from activities.training.checkpoint_manifest import MANIFEST, verify
from activities.training.errors import CheckpointError
from activities.training.megatron import checkpoint
from activities.training.megatron.engine import Engine
from tests.training.samples import differing, exported, make_batch, new_engine, steady, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "qwen3-tied")


@pytest.fixture(params=[False, True], ids=["plain-optimizer", "distributed-optimizer"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Engine:
    return loaded_engine(model_dir, distributed=request.param)


@pytest.fixture
def writer(model_dir: Path) -> Engine:
    """For what is about folders and files: they are the same whatever the optimizer is."""
    return loaded_engine(model_dir, distributed=True)


def loaded_engine(model_dir: Path, *, distributed: bool) -> Engine:
    engine = new_engine(use_distributed_optimizer=distributed, weight_decay=0.01, lr_warmup_steps=3)
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

    assert [steady(step) for step in resumed] == [steady(step) for step in straight]
    assert differing(straight_weights, exported(engine, tmp_path / "resumed")) == []
    assert engine.version == 4


def test_version_0_can_be_saved_and_resumed(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    engine.save(tmp_path / "checkpoint")
    straight = engine.train(make_batch())

    engine.load(tmp_path / "checkpoint", model_dir)

    assert engine.version == 0
    assert steady(engine.train(make_batch())) == steady(straight)


def test_a_checkpoint_can_be_written_and_read_in_another_thread(
    writer: Engine, model_dir: Path, tmp_path: Path
) -> None:
    def work() -> None:
        writer.train(make_batch())
        writer.save(tmp_path / "checkpoint")
        writer.load(tmp_path / "checkpoint", model_dir)

    thread = Thread(target=work)
    thread.start()
    thread.join(timeout=60)

    assert writer.version == 1


def test_a_resumed_engine_draws_what_it_would_have_drawn(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    torch.rand(5)
    engine.save(tmp_path / "checkpoint")
    expected = torch.rand(3)

    engine.load(tmp_path / "checkpoint", model_dir)

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_checkpoint_holds_state_and_no_settings(model_dir: Path, tmp_path: Path, distributed: bool) -> None:
    settings: dict[str, Any] = {"use_distributed_optimizer": distributed, "weight_decay": 0.01, "adam_beta1": 0.9}
    engine = new_engine(**settings)
    engine.load_model(model_dir)
    engine.train(make_batch())
    engine.save(tmp_path / "checkpoint")

    others: dict[str, Any] = settings | {"weight_decay": 0.5, "adam_beta1": 0.7}
    changed = new_engine(**others)
    changed.load_model(model_dir)
    fresh = settings_of(changed)
    changed.load(tmp_path / "checkpoint", model_dir)

    assert settings_of(changed) == fresh
    assert {group["betas"] for group in fresh} == {(0.7, 0.999)}
    assert max(group["weight_decay"] for group in fresh) == 0.5


def settings_of(engine: Engine) -> list[dict[str, Any]]:
    """The parameter groups, without their parameters and the number of steps they have taken."""
    groups = engine._loaded().optimizer.param_groups
    return [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]


def test_the_checkpoint_of_a_version_is_kept_and_that_of_another_version_replaced(
    writer: Engine, model_dir: Path, tmp_path: Path
) -> None:
    writer.train(make_batch())
    writer.save(tmp_path / "checkpoint")
    first = written_file(tmp_path / "checkpoint" / MANIFEST)

    writer.load(tmp_path / "checkpoint", model_dir)
    writer.save(tmp_path / "checkpoint")
    assert written_file(tmp_path / "checkpoint" / MANIFEST) == first

    writer.train(make_batch(1))
    writer.save(tmp_path / "checkpoint")
    assert verify(tmp_path / "checkpoint", digests=True).version == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("spoil", ["no manifest", "no file", "shorter", "other bytes"])
def test_a_checkpoint_that_is_not_complete_is_replaced(
    writer: Engine, model_dir: Path, tmp_path: Path, spoil: str
) -> None:
    writer.train(make_batch())
    writer.save(tmp_path / "checkpoint")
    file = largest_file(tmp_path / "checkpoint")
    content = file.read_bytes()
    if spoil == "no manifest":
        (tmp_path / "checkpoint" / MANIFEST).unlink()
    elif spoil == "no file":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if spoil == "shorter" else content[:-1] + bytes([content[-1] ^ 1]))

    writer.save(tmp_path / "checkpoint")

    writer.load(tmp_path / "checkpoint", model_dir)
    assert writer.version == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_trainer_that_saves_the_same_version_meanwhile_wins(
    writer: Engine, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.train(make_batch())
    write_state, inodes = checkpoint.write_state, list[int]()

    def overtaken(*arguments: Any) -> None:
        write_state(*arguments)
        if not inodes:
            inodes.append(0)
            writer.save(tmp_path / "checkpoint")
            inodes[0] = (tmp_path / "checkpoint").stat().st_ino

    monkeypatch.setattr(checkpoint, "write_state", overtaken)
    writer.save(tmp_path / "checkpoint")

    assert (tmp_path / "checkpoint").stat().st_ino == inodes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    writer.load(tmp_path / "checkpoint", model_dir)
    assert writer.version == 1


def test_a_full_disk_is_named_and_leaves_no_checkpoint(
    writer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            writer.save(tmp_path / "checkpoint")

    assert not (tmp_path / "checkpoint").exists()
    writer.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_folder_without_a_checkpoint_is_named(writer: Engine, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}"):
        writer.load(tmp_path, model_dir)


def test_a_damaged_file_is_named_and_the_engine_can_take_another_checkpoint(
    writer: Engine, model_dir: Path, tmp_path: Path
) -> None:
    writer.save(tmp_path / "version-0")
    writer.train(make_batch())
    writer.save(tmp_path / "version-1")
    file = largest_file(tmp_path / "version-1")
    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=f"{file} has 100 bytes.*choose an older checkpoint"):
        writer.load(tmp_path / "version-1", model_dir)

    assert writer.version is None
    writer.load(tmp_path / "version-0", model_dir)
    assert writer.version == 0


@pytest.mark.parametrize("other", ["qwen2-untied", "llama3-rope"])
def test_a_checkpoint_of_another_model_is_refused(engine: Engine, tmp_path: Path, other: str) -> None:
    """A tied Llama lacks only the norms of the heads: all that it needs is there, and some more."""
    engine.save(tmp_path / "checkpoint")

    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load(tmp_path / "checkpoint", write_model(tmp_path / "other", other))


def test_a_checkpoint_of_the_other_optimizer_is_refused(engine: Engine, model_dir: Path, tmp_path: Path) -> None:
    distributed = engine._training.use_distributed_optimizer
    engine.save(tmp_path / "checkpoint")
    other = new_engine(use_distributed_optimizer=not distributed)

    with pytest.raises(CheckpointError, match=r"another layout .*plain optimizer.*distributed optimizer|distr.*plain"):
        other.load(tmp_path / "checkpoint", model_dir)


def written_file(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was last written (reading it changes more of its status)."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def largest_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
