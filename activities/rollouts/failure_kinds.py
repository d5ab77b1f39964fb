"""NeMo-Gym's names for failures (`nemo_gym.failure_kinds`), and which of them another attempt can get past.

A name says what went wrong, not whether the rollout may count: verdict.py asks here only once it may not. A replaying
attempt says the same again without generating anything, so what may pass is cheap to try again, and what the rollout
itself leads to is not worth it. A name that is not in the table, an environment's own `server:kind` too, is data, as
an error that nobody recognises is.
"""

import re
from types import MappingProxyType
from typing import Any

from workflows.messages import Bucket

_NAME = re.compile(r"[a-z][a-z0-9_]*(:[a-z][a-z0-9_]*)?")
_MAX_NAME_CHARS = 100

BUCKETS = MappingProxyType[str, Bucket](
    {
        # Another process was not reached, or not any more.
        "transport_unreachable": "infra",
        "transport_peer_drop": "infra",
        "transport_timeout": "infra",
        "transport_local_resource": "infra",
        # As a 5xx of `/run`: a bug of the agent and a dead server behind it look the same.
        "agent_run_error": "infra",
        "agent_request_failed": "infra",
        "agent_timeout": "infra",
        "verifier_error": "infra",
        # The judge could not be asked.
        "judge_failed": "infra",
        # Sandboxes, browsers and containers are shared; the next attempt gets a fresh one.
        "provider_unavailable": "infra",
        "provider_quota_exhausted": "infra",
        "provider_oom_killed": "infra",
        # The next attempt opens a session of its own.
        "session_lost": "infra",
        "session_expired": "infra",
        # Something ended the episode from outside.
        "cancelled": "infra",
        "kill_shaped": "infra",
        "shutdown": "infra",
        "persistence_failed": "infra",
        # The siblings that were judged together fail together, and come together again.
        "cohort_incomplete": "infra",
        # What the policy said led to these, and it would say it again.
        "agent_command_not_allowed": "data",
        "judge_unparseable": "data",
        # The episode was over and measured by then; running it again would change nothing.
        "session_release_failed": "data",
    }
)


def failure_kind(value: Any) -> str | None:
    """A name as NeMo-Gym writes them, or None: whatever else a server sends there is no name to group by."""
    named = isinstance(value, str) and len(value) <= _MAX_NAME_CHARS and _NAME.fullmatch(value)
    return value if named else None


def bucket_of_kind(kind: str | None) -> Bucket:
    """Whether another attempt can help."""
    return BUCKETS.get(kind or "", "data")
