"""A task's recovery counts over its agent's, and that over the run's."""

from typing import Any

import pytest

from activities.rollouts.recovery import recovery_of
from configs.rollouts import RecoveryConfig

RULES = RecoveryConfig(default="replay", agents={"mail_agent": "none"}, tasks={"read-only": "fresh"})


@pytest.mark.parametrize(
    ("agent", "fields", "mode"),
    [
        ("safe_agent", {}, "replay"),
        ("mail_agent", {}, "none"),
        ("mail_agent", {"task_name": "read-only"}, "fresh"),
        ("mail_agent", {"task_name": "send"}, "none"),
        ("safe_agent", {"task_name": "read-only"}, "fresh"),
        ("safe_agent", {"task_name": None}, "replay"),
        ("safe_agent", {"task_name": ["read-only"]}, "replay"),
    ],
)
def test_rule_nearest_to_the_row_counts(agent: str, fields: dict[str, Any], mode: str) -> None:
    assert recovery_of({"agent_ref": {"name": agent}, **fields}, RULES) == mode


def test_without_rules_everything_is_replayed() -> None:
    assert recovery_of({"agent_ref": {"name": "safe_agent"}}, RecoveryConfig()) == "replay"
