"""What a later attempt at a rollout may take over: a task's own rule, else its agent's, else the run's."""

from typing import Any

from configs.rollouts import RecoveryConfig, RecoveryMode


def recovery_of(row: dict[str, Any], recovery: RecoveryConfig) -> RecoveryMode:
    """The mode for a dataset row."""
    task, agent = row.get("task_name"), row["agent_ref"]["name"]
    if isinstance(task, str) and task in recovery.tasks:
        return recovery.tasks[task]
    return recovery.agents.get(agent, recovery.default)
