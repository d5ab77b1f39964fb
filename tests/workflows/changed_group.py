"""A PromptGroup that somebody changed without a patch marker: it waits before it opens the group."""

import asyncio

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows.messages import GroupInput, GroupResult
    from workflows.prompt_group import PromptGroup


@workflow.defn(name="PromptGroup")
class HesitantPromptGroup(PromptGroup):
    """PromptGroup with one more timer."""

    @workflow.init
    def __init__(self, group: GroupInput) -> None:
        super().__init__(group)

    @workflow.run
    async def run(self, group: GroupInput) -> GroupResult:
        """Wait a second, then do the same."""
        await asyncio.sleep(1)
        return await super().run(group)
