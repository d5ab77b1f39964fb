"""The table of NeMo-Gym's failure kinds: complete, and strict about what is a name."""

import json
import subprocess

import pytest

from activities.rollouts.failure_kinds import BUCKETS, bucket_of_kind, failure_kind
from workers.environments.paths import child_environment, environment_python

ASK = """
import json
from nemo_gym.failure_kinds import FAILURE_KINDS
print(json.dumps(sorted(FAILURE_KINDS)))
"""


@pytest.mark.integration
def test_the_table_has_every_kind_of_the_installed_nemo_gym_and_no_other() -> None:
    output = subprocess.run(
        [environment_python("gym"), "-c", ASK], env=child_environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(output.stdout) == sorted(BUCKETS)


@pytest.mark.parametrize("kind", [*BUCKETS, "usersim:scorer_inconclusive", "timeout_exceeded"])
def test_a_name_is_kept_as_it_is(kind: str) -> None:
    assert failure_kind(kind) == kind


@pytest.mark.parametrize(
    "value", [None, "", 3, ["judge_failed"], "Judge", "judge_failed\n", "a b", "a:b:c", ":b", "x" * 101]
)
def test_anything_else_is_no_name(value: object) -> None:
    assert failure_kind(value) is None


@pytest.mark.parametrize(
    ("kind", "bucket"),
    [
        ("transport_timeout", "infra"),
        ("judge_failed", "infra"),
        ("session_lost", "infra"),
        ("kill_shaped", "infra"),
        ("judge_unparseable", "data"),
        ("agent_command_not_allowed", "data"),
        ("safe:jammed", "data"),
        ("nobody_knows", "data"),
        (None, "data"),
    ],
)
def test_what_nobody_recognises_is_data(kind: str | None, bucket: str) -> None:
    assert bucket_of_kind(kind) == bucket
