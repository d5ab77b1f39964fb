"""Errors of the trainer. Each message names the folder, key or batch concerned and what to do."""


class TrainingError(Exception):
    """Base of the trainer's typed errors."""


class ModelFolderError(TrainingError):
    """A Hugging Face folder that cannot be trained: something is missing or not supported."""


class LayoutError(TrainingError):
    """The parallel layout fits neither the processes that run nor the shape of the model."""


class EmptyBatch(TrainingError):
    """A batch without a single token that the loss can see."""


class RowTooLong(TrainingError):
    """A row that is longer than `training.max_row_tokens` or the model's positions."""


class NonFiniteStep(TrainingError):
    """A loss or gradient that is not finite; the message names the rows. The weights were not changed."""


class LogProbGap(TrainingError):
    """vLLM and the trainer disagree about a token by more than `training.max_logprob_gap`. Nothing was changed."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""
