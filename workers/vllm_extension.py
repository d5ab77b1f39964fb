# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (vLLM is installed only in its own environment; the extension's `self` is vLLM's worker.)
"""New weights inside vLLM's worker processes: loaded all or not at all, and known by their digest.

Named by `--worker-extension-cls workers.vllm_extension.PolicyWorker`; importing it registers two weight transfer
backends. `safetensors_file` reads a folder that trainer and servers share, on CPUs and GPUs. `nccl_policy` is vLLM's
own NCCL backend with a digest; it has NOT YET RUN ON A GPU.
"""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

FILE_BACKEND = "safetensors_file"
NCCL_BACKEND = "nccl_policy"
INDEX_NAME = "model.safetensors.index.json"
_MAX_NAMES = 5


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to connect."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A folder with a model in Hugging Face format, and the digest of its weight files."""

    path: str
    digest: str


@dataclass
class NcclUpdate(NCCLWeightTransferUpdateInfo):
    """What is broadcast, and the digest of the weight files that it was read from."""

    digest: str = field(kw_only=True)


class PolicyWeights(WeightTransferEngine[Any, Any]):
    """The life of an update, whatever the backend. `process` is another after every start; `digest` names the weights
    of the last update that was finished; it is None before the first, and during one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process = uuid.uuid4().hex
        self.digest: str | None = None
        self._received: str | None = None

    def start_weight_update(self) -> None:
        """Put the model into loading mode; layers that an interrupted update left half loaded start over."""
        self.digest = self._received = None
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which synchronises an accelerator that a CPU does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Make the loaded weights the served ones."""
        if self._received is None:
            raise RuntimeError("A weight update cannot be finished before weights were loaded.")
        untouched = [layer for layer in self.model.modules() if _got_nothing(layer)]
        finalize_layerwise_reload(self.model, self.model_config)
        self._process_tied(untouched)
        self.digest = self._received

    def _process_tied(self, untouched: list[torch.nn.Module]) -> None:
        """Renew what was made from the weights of layers that share them: the CPU build packs the output layer's.

        vLLM leaves a layer alone that received no tensor of its own, so a tied output layer would go on with the
        packed copy of the old embedding.
        """
        skipped = {id(layer) for layer in untouched}
        loaded = {
            id(parameter)
            for layer in self.model.modules()
            if id(layer) not in skipped
            for parameter in layer.parameters(recurse=False)
        }
        for layer in untouched:
            if any(id(parameter) not in loaded for parameter in layer.parameters(recurse=False)):
                raise RuntimeError(f"No weights for a layer of type {type(layer).__name__} are among those loaded.")
            method = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)


class FileWeights(PolicyWeights):
    """Weights from a folder that this process can read."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load every tensor of the folder, one at a time."""
        self.model.load_weights(_tensors(Path(update_info.path)))
        self._received = update_info.digest

    def shutdown(self) -> None:
        """Nothing to disconnect."""


class NcclWeights(PolicyWeights, NCCLWeightTransferEngine):
    """Weights from the GPU of the generation worker, which makes a group for each update."""

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NcclUpdate

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group of this update; one that a killed sender left is closed."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: NcclUpdate) -> None:
        """Load every tensor as it arrives."""
        super().receive_weights(update_info)
        self._received = update_info.digest


for backend, engine in ((FILE_BACKEND, FileWeights), (NCCL_BACKEND, NcclWeights)):
    if backend not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(backend, engine)


class PolicyWorker:
    """Methods added to vLLM's worker; called through `/collective_rpc`, they answer with JSON objects."""

    def served_weights(self) -> dict[str, str | None]:
        """Which weights this process serves, and which process this is."""
        return {"process": self.weight_transfer_engine.process, "digest": self.weight_transfer_engine.digest}

    def problem_with_weights(self, path: str) -> dict[str, str | None]:
        """Compare names and shapes with the model that the server was started with; changes nothing."""
        try:
            new, served = _shapes(Path(path)), _shapes(Path(self.model_config.model))
        except (OSError, ValueError, KeyError) as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        except Exception as error:  # safetensors has an exception class of its own for files that are cut short
            return {"problem": f"{path} holds a file that is not safetensors: {error}"}
        for what, names in (
            ("lacks", sorted(served.keys() - new.keys())),
            ("has unknown", sorted(new.keys() - served.keys())),
            ("has another shape of", sorted(name for name in new.keys() & served.keys() if new[name] != served[name])),
        ):
            if names:
                return {
                    "problem": f"it {what} {len(names)} tensors of the served model: {', '.join(names[:_MAX_NAMES])}"
                }
        return {"problem": None}

    def abandon_weight_update(self) -> dict[str, bool]:
        """Forget an update that its client left open; the next one starts over. The model stays unusable until then."""
        was_active = self._weight_update_active
        if was_active:
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
        return {"abandoned": was_active}


def _got_nothing(layer: torch.nn.Module) -> bool:
    """Whether a layer in loading mode has parameters and received none of them."""
    info = get_layerwise_info(layer)
    loading = info.can_load() and not is_deferred_attention_layer(layer)
    return loading and info.load_numel == 0 and next(layer.parameters(recurse=False), None) is not None


def _files(folder: Path) -> list[Path]:
    """The weight files of a model folder: those of the index where there is one."""
    index = folder / INDEX_NAME
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file that this server can see")
    return files


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes
