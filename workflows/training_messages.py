"""What crosses Temporal when a step trains, publishes its weights and refits: ids, digests, counts, metrics."""

from workflows.messages import Message, WeightsRef


class TrainStep(Message):
    """Apply optimizer step `step` with a stored batch: policy version step -> step + 1."""

    run_id: str
    step: int
    batch_digest: str


class StepApplied(Message):
    """The recorded result of an optimizer step."""

    step: int
    batch_digest: str
    policy_version: int
    replayed_steps: int
    metrics: dict[str, float]
    checkpoint_seconds: float = 0.0


class PublishWeights(Message):
    """Export policy version `version` for generation."""

    run_id: str
    version: int


class Refit(Message):
    """Load weights on every endpoint and stamp them `policy-<version>`."""

    run_id: str
    weights: WeightsRef


class RestorePolicy(Message):
    """Load the newest published version on endpoints that do not serve it (a server was started again)."""

    run_id: str


class RefitDone(Message):
    """`endpoints` of them sample with this version; `quarantined` are the addresses of those that do not take part."""

    version: int
    endpoints: int
    seconds: float
    quarantined: tuple[str, ...] = ()


class RecordStep(Message):
    """Write a step's metrics (ledger and TensorBoard)."""

    run_id: str
    step: int
    metrics: dict[str, float]
