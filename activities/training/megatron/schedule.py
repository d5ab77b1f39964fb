"""The learning rate of a step: a pure function of the policy version, so that nothing of it has to be saved."""

import math

from configs.training import TrainingConfig


def learning_rate(training: TrainingConfig, version: int) -> float:
    """Rate of the step from `version` to the next.

    The first `lr_warmup_steps` steps rise linearly and the last of them has the full rate. After that it is constant,
    or falls from the full rate at version `lr_warmup_steps` to `min_lr` at version `lr_decay_steps`, where it stays.
    """
    if version < training.lr_warmup_steps:
        return training.lr * (version + 1) / training.lr_warmup_steps
    if training.lr_decay_style == "constant":
        return training.lr
    steps = training.lr_decay_steps - training.lr_warmup_steps
    done = min(1.0, (version - training.lr_warmup_steps) / steps)
    left = 1.0 - done if training.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return training.min_lr + (training.lr - training.min_lr) * left
