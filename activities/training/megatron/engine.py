"""The trainer of one rank: load version 0, apply optimizer steps, export weights, save and resume.

Every public method is collective: all ranks call the same methods with the same arguments, in the same order. The
same weights and batch give the same next weights, bit for bit, on the same machine and layout. A step that raises
leaves the weights as they were.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from activities.training.batch import TrainingBatch
from activities.training.errors import EmptyBatch, NonFiniteStep, RowTooLong, TrainingError
from activities.training.megatron.checkpoint import load_checkpoint, save_checkpoint
from activities.training.megatron.cpu_shims import megatron_device
from activities.training.megatron.hf_reader import check_tokenizer
from activities.training.megatron.hf_writer import FolderWriter
from activities.training.megatron.model import build_model, model_dtype
from activities.training.megatron.optimizer import build_optimizer, learning_rate, set_learning_rate, wrap_model
from activities.training.megatron.passes import LossInputs, gradients, log_probabilities
from activities.training.megatron.ranks import join_ranks, trainer_device
from activities.training.megatron.shape import ModelShape, check_layout, read_shape
from activities.training.megatron.weights import export_weights, import_weights
from activities.training.microbatches import MicroBatch, micro_batches
from configs.grpo import LossConfig
from configs.training import TrainingConfig


@dataclass
class _Policy:
    """What is being trained. `reference` holds version 0 of this rank's parameters on the CPU."""

    source: Path
    shape: ModelShape
    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: MegatronOptimizer
    reference: list[Tensor]
    version: int


class Engine:
    """One Megatron-core model with its optimizer and the reference policy (version 0)."""

    def __init__(self, training: TrainingConfig, loss: LossConfig, seed: int) -> None:
        self._training, self._loss, self._seed = training, loss, seed
        self._policy: _Policy | None = None
        with self._session():
            join_ranks(training, seed)

    @property
    def rank(self) -> int:
        """Number of this process among the trainer's ranks."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of the trainer's ranks."""
        return dist.get_world_size()

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None until a model or checkpoint is loaded."""
        return None if self._policy is None else self._policy.version

    def load_model(self, model_dir: Path) -> None:
        """Load a Hugging Face folder as policy version 0, with a fresh optimizer."""
        with self._session():
            self._policy = None  # frees the memory of an earlier model first
            self._policy = self._build(model_dir)

    def train(self, batch: TrainingBatch) -> dict[str, float]:
        """Apply one optimizer step; version + 1. Returns the metrics, equal on all ranks."""
        with self._session():
            policy = self._loaded()
            self._check(batch, policy.shape)
            micros = micro_batches(
                batch,
                rows_per_pass=self._training.train_micro_batch_size,
                data_parallel_size=self._training.data_parallel_size,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                device=trainer_device(),
            )
            reference = self._reference_log_probabilities(policy, micros)
            inputs = [LossInputs(*item) for item in zip(micros, reference, strict=True)]
            policy.optimizer.zero_grad()
            metrics = gradients(policy.wrapped, inputs, self._loss)
            rate = learning_rate(self._training, policy.version)
            metrics["grad_norm"] = self._step(policy, metrics["loss"], rate, batch)
            metrics["lr"] = rate
            policy.version += 1
            return metrics | _counts(batch)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder (temporary folder, then rename). Rank 0 writes."""
        with self._session():
            policy = self._loaded()
            dtype = model_dtype(self._training)
            writer = FolderWriter(folder, policy.source, dtype) if self.rank == 0 else None
            export_weights(policy.model, policy.shape, writer)
            if writer is not None:
                writer.finish()
            dist.barrier()

    def save(self, folder: Path) -> None:
        """Write a checkpoint (weights, optimizer, version): temporary folder, then rename."""
        with self._session():
            policy = self._loaded()
            save_checkpoint(folder, policy.model, policy.optimizer, policy.version)

    def load(self, folder: Path, model_dir: Path) -> None:
        """Resume from a checkpoint; `model_dir` gives the shape and the reference policy (version 0)."""
        with self._session():
            self._policy = None
            policy = self._build(model_dir)
            policy.version = load_checkpoint(folder, policy.model, policy.optimizer)
            self._policy = policy

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Shims, gradients and threads for the calling thread: any thread may call the engine, one at a time."""
        with megatron_device(), torch.enable_grad():
            if self._training.threads:
                torch.set_num_threads(self._training.threads)
            yield

    def _loaded(self) -> _Policy:
        if self._policy is None:
            raise TrainingError("The engine holds no weights yet: call load_model or load first.")
        return self._policy

    def _build(self, model_dir: Path) -> _Policy:
        shape = read_shape(model_dir)
        check_tokenizer(model_dir)
        check_layout(shape, self._training)
        model = build_model(shape, self._training)
        import_weights(model, shape, model_dir)
        keeps_reference = self._loss.reference_policy_kl_penalty > 0
        reference = [p.detach().to("cpu", copy=True) for p in model.parameters()] if keeps_reference else []
        wrapped = wrap_model(model, self._training)
        optimizer = build_optimizer(wrapped, self._training)
        return _Policy(model_dir, shape, model, wrapped, optimizer, reference, version=0)

    def _check(self, batch: TrainingBatch, shape: ModelShape) -> None:
        where = f"The batch of run {batch.run_id}, step {batch.step}"
        if batch.trained_tokens == 0:
            raise EmptyBatch(
                f"{where}, has {len(batch.rows)} rows but no sampled token to train on. Its rollouts are all masked or "
                "empty; such a step must not be trained."
            )
        longest = max(batch.rows, key=lambda row: len(row.tokens))
        limit = min(self._training.max_row_tokens, shape.max_positions)
        if len(longest.tokens) > limit:
            raise RowTooLong(
                f"{where}: rollout {longest.rollout_id}, segment {longest.segment}, has {len(longest.tokens)} tokens; "
                f"the limit is {limit} (training.max_row_tokens, and max_position_embeddings of the model)."
            )
        highest = max(int(row.tokens.max()) for row in batch.rows)
        if highest >= shape.vocab_size or min(int(row.tokens.min()) for row in batch.rows) < 0:
            raise TrainingError(
                f"{where}: a token id is outside the model's vocabulary of {shape.vocab_size}. The rollouts were "
                "sampled from another model."
            )

    def _reference_log_probabilities(self, policy: _Policy, micros: list[MicroBatch]) -> list[Tensor | None]:
        """Log-probabilities of version 0, whose weights take the place of the current ones for one pass."""
        if not policy.reference:
            return [None] * len(micros)
        parameters = list(policy.model.parameters())
        current = [parameter.detach().clone() for parameter in parameters]
        _copy(policy.reference, parameters)
        try:
            return log_probabilities(policy.wrapped, micros)
        finally:
            _copy(current, parameters)

    def _step(self, policy: _Policy, loss: float, rate: float, batch: TrainingBatch) -> float:
        """Clip and apply the gradients; returns their norm before clipping."""
        set_learning_rate(policy.optimizer, rate)
        policy.optimizer.prepare_grads()
        norm = float(policy.optimizer.get_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteStep(
                f"Step {batch.step} of run {batch.run_id} gives loss {loss} and gradient norm {norm}. The weights of "
                f"version {policy.version} are unchanged. Lower training.lr, or look for wrong log-probabilities."
            )
        policy.optimizer.step()
        return norm


@torch.no_grad()
def _copy(values: list[Tensor], parameters: list[torch.nn.Parameter]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.copy_(value)


def _counts(batch: TrainingBatch) -> dict[str, float]:
    """Metrics that need no model; `advantages/*` are over trained tokens."""
    trained = [row for row in batch.rows if row.trained_tokens]
    total = math.fsum(row.advantage * row.trained_tokens for row in trained)
    return {
        "global_valid_toks": float(batch.trained_tokens),
        "num_valid_samples": float(len({row.rollout_id for row in trained})),
        "advantages/mean": total / batch.trained_tokens,
        "advantages/max": max(row.advantage for row in trained),
        "advantages/min": min(row.advantage for row in trained),
    }
