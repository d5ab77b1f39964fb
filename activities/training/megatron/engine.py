"""The trainer of one rank: load version 0, apply optimizer steps, export weights, save and resume.

Every public method is collective: all ranks call the same methods with the same arguments, in the same order. The
same weights and batch give the same next weights, bit for bit, on the same machine and layout. A step that raises
leaves weights, optimizer state and version as they were, and the engine as ready as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from activities.training.batch import TrainingBatch
from activities.training.errors import EmptyBatch, RowTooLong, TrainingError
from activities.training.megatron.checkpoint import load_checkpoint, save_checkpoint
from activities.training.megatron.cpu_shims import megatron_device
from activities.training.megatron.hf_reader import check_tokenizer
from activities.training.megatron.hf_writer import FolderWriter
from activities.training.megatron.model import build_model, model_dtype
from activities.training.megatron.optimizer import build_optimizer, wrap_model
from activities.training.megatron.policy import Policy
from activities.training.megatron.ranks import join_ranks
from activities.training.megatron.shape import ModelShape, check_layout, read_shape
from activities.training.megatron.step import Stepper
from activities.training.megatron.weights import export_weights, import_weights
from activities.training.watch import Unwatched, Watch
from configs.grpo import GrpoConfig
from configs.training import TrainingConfig

_UNWATCHED = Unwatched()


class Engine:
    """One Megatron-core model with its optimizer and the reference policy (version 0).

    `temperature` is the sampling temperature of the rollouts: all log-probabilities are those of logits / temperature.
    """

    def __init__(self, training: TrainingConfig, grpo: GrpoConfig, temperature: float = 1.0) -> None:
        self._training, self._grpo, self._temperature = training, grpo, temperature
        self._policy: Policy | None = None
        with self._session():
            join_ranks(training, grpo.seed)

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

    def log_probabilities(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """Log-probability of each token given those before it, [tokens] per row; 0 for the first. Changes nothing."""
        with self._session():
            policy = self._loaded()
            _check_rows(batch, policy.shape, self._training)
            return self._stepper(policy, _UNWATCHED).log_probabilities(batch)

    def train(self, batch: TrainingBatch, watch: Watch = _UNWATCHED) -> dict[str, float]:
        """Apply one optimizer step; version + 1. Returns the metrics, always all of them, equal on all ranks.

        Raises:
            EmptyBatch: no token trains, or the log-probability filter left none.
            RowTooLong: a row is longer than `training.max_row_tokens` or the model's positions.
            NonFiniteStep: loss or gradient is not finite; the rows that caused it are named.
            LogProbGap: a token is further off than `training.max_logprob_gap`.
            StepCancelled: the watch raised it.
        """
        with self._session():
            policy = self._loaded()
            _check_batch(batch, policy.shape, self._training)
            return self._stepper(policy, watch).apply(batch)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder (temporary folder, then rename). Rank 0 writes."""
        with self._session():
            policy = self._loaded()
            dtype = model_dtype(self._training)
            writer = FolderWriter(folder, policy.source, dtype) if self.rank == 0 else None
            export_weights(policy.model, policy.shape, writer)

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

    def _loaded(self) -> Policy:
        if self._policy is None:
            raise TrainingError("The engine holds no weights yet: call load_model or load first.")
        return self._policy

    def _stepper(self, policy: Policy, watch: Watch) -> Stepper:
        return Stepper(policy, self._training, self._grpo, watch)

    def _build(self, model_dir: Path) -> Policy:
        shape = read_shape(model_dir)
        check_tokenizer(model_dir)
        check_layout(shape, self._training)
        model = build_model(shape, self._training, self._temperature)
        import_weights(model, shape, model_dir)
        keeps_reference = self._grpo.loss_fn.reference_policy_kl_penalty > 0
        reference = [p.detach().to("cpu", copy=True) for p in model.parameters()] if keeps_reference else []
        wrapped = wrap_model(model, self._training)
        optimizer = build_optimizer(wrapped, self._training)
        return Policy(model_dir, shape, model, wrapped, optimizer, reference, version=0)


def _check_batch(batch: TrainingBatch, shape: ModelShape, training: TrainingConfig) -> None:
    if batch.trained_tokens == 0:
        raise EmptyBatch(
            f"{_where(batch)}, has {len(batch.rows)} rows but no sampled token to train on. Its rollouts are all "
            "masked or empty; such a step must not be trained."
        )
    _check_rows(batch, shape, training)


def _check_rows(batch: TrainingBatch, shape: ModelShape, training: TrainingConfig) -> None:
    longest = max(batch.rows, key=lambda row: len(row.tokens))
    limit = min(training.max_row_tokens, shape.max_positions)
    if len(longest.tokens) > limit:
        raise RowTooLong(
            f"{_where(batch)}: rollout {longest.rollout_id}, segment {longest.segment}, has {len(longest.tokens)} "
            f"tokens; the limit is {limit} (training.max_row_tokens, and max_position_embeddings of the model)."
        )
    highest = max(int(row.tokens.max()) for row in batch.rows)
    if highest >= shape.vocab_size or min(int(row.tokens.min()) for row in batch.rows) < 0:
        raise TrainingError(
            f"{_where(batch)}: a token id is outside the model's vocabulary of {shape.vocab_size}. The rollouts were "
            "sampled from another model."
        )


def _where(batch: TrainingBatch) -> str:
    return f"The batch of run {batch.run_id}, step {batch.step}"
