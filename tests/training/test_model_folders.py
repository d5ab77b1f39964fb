"""A model folder that cannot be trained says which folder, what is wrong, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from activities.training.errors import LayoutError, ModelFolderError
from activities.training.megatron.shape import check_layout, read_shape
from configs.training import TrainingConfig
from tests.training.samples import new_engine, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model."""
    return write_model(tmp_path / "model", "qwen3-tied")


def change_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "cannot be read"),
        (drop_a_tensor, "no tensor model.layers.1.mlp.up_proj.weight"),
        (change_config(model_type="mamba"), "type 'mamba'.*llama, qwen2, qwen3"),
        (change_config(attention_bias=True), "attention_bias=True"),
        (change_config(use_sliding_window=True), "use_sliding_window=True"),
        (change_config(hidden_act="gelu"), "hidden_act='gelu'"),
        (change_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rotary embeddings .*yarn"),
        (change_config(intermediate_size=64), "does not fit its config.json"),
    ],
)
def test_a_bad_folder_is_named(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    engine = new_engine()

    with pytest.raises(ModelFolderError, match=message) as refused:
        engine.load_model(folder)

    assert str(folder) in str(refused.value)
    assert engine.version is None


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_model_parallel_size": 4}, "2 key/value heads, which training.tensor_model_parallel_size=4"),
        ({"pipeline_model_parallel_size": 4}, "2 layers, which training.pipeline_model_parallel_size=4"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(folder: Path, layout: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(read_shape(folder), TrainingConfig(**layout))  # pyright: ignore[reportArgumentType]


def test_a_layout_for_other_processes_says_how_to_start_them() -> None:
    with pytest.raises(LayoutError, match=r"torchrun --nproc-per-node=2"):
        new_engine(data_parallel_size=2)


def test_transformer_engine_that_is_not_installed_is_named(folder: Path) -> None:
    engine = new_engine(layer_spec="transformer_engine")

    with pytest.raises(LayoutError, match="Transformer Engine cannot be imported"):
        engine.load_model(folder)


def test_older_spelling_of_rotary_settings_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0, "rope_scaling": None}))

    assert read_shape(folder).rope_theta == 5000.0
