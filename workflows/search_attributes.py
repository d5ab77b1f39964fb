# pyright: reportUnknownMemberType=false
# (the SDK declares upsert_search_attributes with an unparametrised generic)
"""Search attributes of all workflows. Ids, states and counts only: search attributes are never encrypted.

A Temporal service on SQL has room for three Int attributes, so the three counters are Double; `RunId` is Temporal's
own.
"""

from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

RUN_ID = SearchAttributeKey.for_keyword("TrainingRunId")
TRAIN_STEP = SearchAttributeKey.for_int("TrainStep")
PROMPT_ID = SearchAttributeKey.for_keyword("PromptId")
GROUP_STATE = SearchAttributeKey.for_keyword("GroupState")
FAILURE_CLASS = SearchAttributeKey.for_keyword_list("FailureClass")
POLICY_VERSION = SearchAttributeKey.for_int("PolicyVersion")
VALID_ROLLOUTS = SearchAttributeKey.for_float("ValidRollouts")
MASKED_ROLLOUTS = SearchAttributeKey.for_float("MaskedRollouts")
LOST_ROLLOUTS = SearchAttributeKey.for_float("LostRollouts")


def show(*updates: SearchAttributeUpdate[Any]) -> None:
    """Set search attributes of the current workflow."""
    workflow.upsert_search_attributes(updates)
