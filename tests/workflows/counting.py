"""The drop counters as a fold over groups in the order in which they end: what the ledger must come to."""

from workflows.messages import BudgetState, GroupResult


def counted(budgets: BudgetState, group: GroupResult) -> BudgetState:
    """The counters after one more group ended."""
    if group.state in ("sealed", "set_aside"):
        return budgets.model_copy(update={"consecutive_drops": 0})
    if group.bucket == "infra":
        return budgets.model_copy(update={"consecutive_drops": budgets.consecutive_drops + 1})
    if group.bucket == "data":
        return budgets.model_copy(update={"skipped_prompts": budgets.skipped_prompts + 1})
    return budgets
