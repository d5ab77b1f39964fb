"""A training batch: the rows of one optimizer step, with one exact byte form.

Equal batches have equal bytes, so a batch is known by its digest and a stored batch trains the same step again.
A rollout is whole in it: its rows stand together, and are its segments 0, 1, 2, ... in order, each once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

FORMAT_VERSION = 1


class BadBatch(ValueError):
    """Rows or bytes that are not a valid training batch."""


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One segment of a rollout: int32 tokens, uint8 loss mask (1 = sampled), float32 log-probabilities, all [tokens].

    `log_probs[t]` is the generation log-probability of token t; 0 where the mask is 0.
    """

    rollout_id: str
    segment: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    log_probs: NDArray[np.float32]
    advantage: float

    def __post_init__(self) -> None:
        where = f"Row {self.rollout_id} segment {self.segment}"
        for name, array, dtype in (
            ("tokens", self.tokens, np.int32),
            ("loss_mask", self.loss_mask, np.uint8),
            ("log_probs", self.log_probs, np.float32),
        ):
            if array.ndim != 1 or array.dtype != dtype:
                raise BadBatch(
                    f"{where}: {name} must be one-dimensional {np.dtype(dtype)}, not {array.dtype}{array.shape}."
                )
        if not 0 < len(self.tokens) == len(self.loss_mask) == len(self.log_probs):
            raise BadBatch(
                f"{where}: {len(self.tokens)} tokens, {len(self.loss_mask)} mask values and {len(self.log_probs)} "
                "log-probabilities; they must be equally many and at least one."
            )
        if self.loss_mask.max() > 1:
            raise BadBatch(f"{where}: the loss mask holds a value other than 0 and 1.")
        if not np.isfinite(self.log_probs).all() or not np.isfinite(self.advantage):
            raise BadBatch(f"{where}: a log-probability or the advantage is not a finite number.")
        if self.log_probs[self.loss_mask == 0].any():
            raise BadBatch(f"{where}: a token that was not sampled has a log-probability.")

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that the loss can see: the first token of a row has nothing before it."""
        return int(self.loss_mask[1:].sum())

    @property
    def is_placeholder(self) -> bool:
        """Whether it only keeps the place of a rollout that does not train: a segment has sampled tokens."""
        return not self.loss_mask.any()


def placeholder(rollout_id: str) -> TrainingRow:
    """The one row of a rollout that does not train: one token, mask 0, so that no loss can see it."""
    return TrainingRow(
        rollout_id=rollout_id,
        segment=0,
        tokens=np.zeros(1, dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.uint8),
        log_probs=np.zeros(1, dtype=np.float32),
        advantage=0.0,
    )


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """All rows of one step, ordered by rollout, then segment; `BadBatch` names the first row that is out of place."""

    run_id: str
    step: int
    rows: tuple[TrainingRow, ...]

    def __post_init__(self) -> None:
        finished: set[str] = set()
        owner, segment = None, -1
        for row in self.rows:
            where = f"Step {self.step} of run {self.run_id}: row {row.rollout_id} segment {row.segment}"
            if row.rollout_id != owner:
                if owner is not None:
                    finished.add(owner)
                owner, segment = row.rollout_id, -1
            if owner in finished:
                raise BadBatch(f"{where} stands apart from the other rows of its rollout; they must stand together.")
            if row.segment != segment + 1:
                expected = f"segment {segment + 1} of this rollout"
                raise BadBatch(
                    f"{where} stands where {expected} belongs: a segment is missing, twice, or out of order."
                )
            segment = row.segment

    @cached_property
    def trained_tokens(self) -> int:
        """Tokens with loss mask 1 over all rows."""
        return sum(row.trained_tokens for row in self.rows)

    @cached_property
    def rollouts(self) -> int:
        """Distinct rollouts that own the rows: all of each group, for those that do not train own a placeholder."""
        return len({row.rollout_id for row in self.rows})

    @cached_property
    def trained_tokens_of(self) -> dict[str, int]:
        """Trained tokens of each rollout that has any, over all its rows, by rollout id."""
        owned: dict[str, int] = {}
        for row in self.rows:
            if row.trained_tokens:
                owned[row.rollout_id] = owned.get(row.rollout_id, 0) + row.trained_tokens
        return owned

    @cached_property
    def first_trained_rows(self) -> dict[str, int]:
        """Index of the first row with a trained token of each rollout that has one, by rollout id."""
        firsts: dict[str, int] = {}
        for index, row in enumerate(self.rows):
            if row.trained_tokens:
                firsts.setdefault(row.rollout_id, index)
        return firsts

    def to_bytes(self) -> bytes:
        """The byte form: flat arrays with offsets, ids as UTF-8, in safetensors."""
        ids = [row.rollout_id.encode() for row in self.rows]
        run = self.run_id.encode()
        return save(
            {
                "advantages": np.array([row.advantage for row in self.rows], dtype=np.float64),
                "id_offsets": _offsets([len(value) for value in ids]),
                "ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
                "log_probs": _concatenate([row.log_probs for row in self.rows], np.float32),
                "loss_mask": _concatenate([row.loss_mask for row in self.rows], np.uint8),
                "offsets": _offsets([len(row.tokens) for row in self.rows]),
                "run_id": np.frombuffer(run, dtype=np.uint8),
                "segments": np.array([row.segment for row in self.rows], dtype=np.int64),
                "step": np.array([FORMAT_VERSION, self.step], dtype=np.int64),
                "tokens": _concatenate([row.tokens for row in self.rows], np.int32),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "TrainingBatch":
        """Read the byte form; `BadBatch` when it is not one."""
        try:
            arrays = load(data)
            version, step = (int(value) for value in arrays["step"])
        except (KeyError, ValueError, SafetensorError) as error:
            raise BadBatch(f"These bytes are not a training batch: {error}") from error
        if version != FORMAT_VERSION:
            raise BadBatch(f"This training batch has format {version}; this version of Onbelay reads {FORMAT_VERSION}.")
        offsets, id_offsets = arrays["offsets"].tolist(), arrays["id_offsets"].tolist()
        ids = arrays["ids"].tobytes()
        rows = tuple(
            TrainingRow(
                rollout_id=ids[id_offsets[i] : id_offsets[i + 1]].decode(),
                segment=int(arrays["segments"][i]),
                tokens=arrays["tokens"][offsets[i] : offsets[i + 1]],
                loss_mask=arrays["loss_mask"][offsets[i] : offsets[i + 1]],
                log_probs=arrays["log_probs"][offsets[i] : offsets[i + 1]],
                advantage=float(arrays["advantages"][i]),
            )
            for i in range(len(arrays["segments"]))
        )
        return cls(run_id=arrays["run_id"].tobytes().decode(), step=step, rows=rows)


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    """[rows + 1] start of each row, and the end."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concatenate(arrays: list[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
