"""All tables: importing this module registers every model with the metadata that migrations are compared with."""

from storage.models.base import Base
from storage.models.captures import Capture, CapturedCall
from storage.models.model_calls import ModelCall, ModelCallLease, Seal, SelectedResponse
from storage.models.operations import LateRefusal, OperatorAction
from storage.models.quarantines import Quarantine
from storage.models.rollouts import Attempt, Group, Rollout
from storage.models.runs import PromptClaim, Run
from storage.models.steps import Batch, BatchGroup, OptimizerStep, StepMetric
from storage.models.trainer_leases import RunTrainer
from storage.models.weights import Checkpoint, Evaluation, PolicyVersion, Refit

METADATA = Base.metadata

__all__ = [
    "METADATA",
    "Attempt",
    "Batch",
    "BatchGroup",
    "Capture",
    "CapturedCall",
    "Checkpoint",
    "Evaluation",
    "Group",
    "LateRefusal",
    "ModelCall",
    "ModelCallLease",
    "OperatorAction",
    "OptimizerStep",
    "PolicyVersion",
    "PromptClaim",
    "Quarantine",
    "Refit",
    "Rollout",
    "Run",
    "RunTrainer",
    "Seal",
    "SelectedResponse",
    "StepMetric",
]
