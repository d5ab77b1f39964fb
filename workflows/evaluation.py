"""Evaluation: one policy version on prompts that are never trained, one rollout each; nothing of it reaches a batch."""

from temporalio import workflow
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy

with workflow.unsafe.imports_passed_through():
    from workflows.calls import Calls
    from workflows.messages import (
        ClaimPrompts,
        EvaluationInput,
        EvaluationResult,
        GroupInput,
        GroupResult,
        PromptClaim,
        RecordEvaluation,
    )
    from workflows.prompt_group import PromptGroup
    from workflows.search_attributes import GROUP_STATE, POLICY_VERSION, PROMPT_ID, RUN_ID, show
    from workflows.together import all_or_none


@workflow.defn(name="Evaluation")
class Evaluation:
    """See the module's first lines."""

    @workflow.run
    async def run(self, evaluation: EvaluationInput) -> EvaluationResult:
        """Run the validation prompts and record their mean reward."""
        version = evaluation.weights.version
        show(POLICY_VERSION.value_set(version))
        calls = Calls(evaluation.task_queue, evaluation.policy)
        claimed = await calls.claim_prompts(
            ClaimPrompts(
                run_id=evaluation.run_id,
                step=version,
                purpose="validation",
                first_slot=0,
                count=evaluation.policy.grpo.max_val_samples,
            )
        )
        groups = await all_or_none(self._group(evaluation, claim) for claim in claimed.claims)
        result = await calls.record_evaluation(
            RecordEvaluation(
                run_id=evaluation.run_id, version=version, group_ids=tuple(group.group_id for group in groups)
            )
        )
        mean = "none" if result.mean_reward is None else f"{result.mean_reward:.3f}"
        workflow.set_current_details(f"**policy-{version}**: mean reward {mean} over {result.rollouts} valid rollouts")
        return result

    async def _group(self, evaluation: EvaluationInput, claim: PromptClaim) -> GroupResult:
        version = evaluation.weights.version
        return await workflow.execute_child_workflow(
            PromptGroup.run,
            GroupInput(
                run_id=evaluation.run_id,
                step=version,
                slot=claim.slot,
                purpose="validation",
                prompt_id=claim.prompt_id,
                row_index=claim.row_index,
                num_rollouts=1,
                min_valid_rollouts=1,
                weights=evaluation.weights,
                policy=evaluation.policy,
                task_queue=evaluation.task_queue,
            ),
            id=f"{evaluation.run_id}/eval-{version}/group-{claim.slot}",
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=f"validation prompt {claim.prompt_id}, policy-{version}",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(RUN_ID, evaluation.run_id),
                    SearchAttributePair(PROMPT_ID, claim.prompt_id),
                    SearchAttributePair(GROUP_STATE, "open"),
                ]
            ),
        )
