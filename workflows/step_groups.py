"""A group of a step, as a child workflow: its id is the group's, so that it never runs twice at a time."""

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy

with workflow.unsafe.imports_passed_through():
    from workflows.children import started
    from workflows.lookahead import newest_version
    from workflows.messages import GroupInput, GroupResult, PromptClaim, RunPolicy, StepInput, WeightsRef
    from workflows.prompt_group import PromptGroup
    from workflows.search_attributes import GROUP_STATE, PROMPT_ID, RUN_ID, TRAIN_STEP


def group_id_of(step: StepInput, claim: PromptClaim) -> str:
    """Id of the group of a claim."""
    return f"{step.run_id}/step-{step.step}/group-{claim.slot}"


async def run_group(
    step: StepInput, policy: RunPolicy, weights: WeightsRef, claim: PromptClaim, replaces: str | None, *, fresh: bool
) -> GroupResult:
    """Run a group until it is sealed or dropped. `policy` and `weights` are today's, not those that the step began
    with."""
    group_id = group_id_of(step, claim)
    group = GroupInput(
        run_id=step.run_id,
        step=step.step,
        slot=claim.slot,
        purpose="train",
        prompt_id=claim.prompt_id,
        row_index=claim.row_index,
        num_rollouts=policy.grpo.num_generations_per_prompt,
        min_valid_rollouts=policy.rollouts.min_valid_rollouts_per_group,
        weights=weights,
        policy=policy,
        task_queue=step.task_queue,
        newest_policy_version=newest_version(step.step, policy.rollouts.max_lookahead_versions),
        replaces=replaces,
        fresh=fresh,
    )
    child = await started(
        group_id,
        lambda: workflow.start_child_workflow(
            PromptGroup.run,
            group,
            id=group_id,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=f"prompt {claim.prompt_id}, step {step.step}",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(RUN_ID, step.run_id),
                    SearchAttributePair(TRAIN_STEP, step.step),
                    SearchAttributePair(PROMPT_ID, claim.prompt_id),
                    SearchAttributePair(GROUP_STATE, "open"),
                ]
            ),
        ),
    )
    return await child
