"""The search attributes of Onbelay's workflows, and how a Temporal namespace gets them.

Registering is idempotent: what is there stays, what is missing is added.
"""

import asyncio

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from workflows.search_attributes import (
    FAILURE_CLASS,
    GROUP_STATE,
    LOST_ROLLOUTS,
    MASKED_ROLLOUTS,
    POLICY_VERSION,
    PROMPT_ID,
    RUN_ID,
    TRAIN_STEP,
    VALID_ROLLOUTS,
)

KEYS = (
    *(RUN_ID, TRAIN_STEP, PROMPT_ID, GROUP_STATE, FAILURE_CLASS),
    *(POLICY_VERSION, VALID_ROLLOUTS, MASKED_ROLLOUTS, LOST_ROLLOUTS),
)
SEARCH_ATTRIBUTES: dict[str, IndexedValueType.ValueType] = {
    key.name: IndexedValueType.ValueType(int(key.indexed_value_type)) for key in KEYS
}
VISIBLE_TIMEOUT_S = 30.0


async def missing_search_attributes(client: Client) -> list[str]:
    """Names that the client's namespace does not have, or has with another type."""
    answer = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return [name for name, kind in SEARCH_ATTRIBUTES.items() if answer.custom_attributes.get(name) != kind]


async def register_search_attributes(client: Client) -> None:
    """Add what is missing and wait until the service shows it."""
    missing = await missing_search_attributes(client)
    if not missing:
        return
    request = AddSearchAttributesRequest(
        namespace=client.namespace, search_attributes={name: SEARCH_ATTRIBUTES[name] for name in missing}
    )
    try:
        await client.operator_service.add_search_attributes(request)
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:  # another `up` was faster
            raise
    async with asyncio.timeout(VISIBLE_TIMEOUT_S):
        while await missing_search_attributes(client):
            await asyncio.sleep(0.1)
