"""Golden numbers of context compaction: what NeMo-Gym's agent decides is what our recipes and our segments rely on."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workers.environments.paths import child_environment, environment_python


@pytest.fixture(scope="module")
def decided() -> dict[str, Any]:
    """The decisions, from the Gym environment."""
    command = [str(environment_python("gym")), str(Path(__file__).parent / "compaction_goldens.py")]
    done = subprocess.run(
        command,
        env={**os.environ, **child_environment()},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_guard_admits_the_limit_and_refuses_one_token_more(decided: dict[str, Any]) -> None:
    assert decided["refused"] == {"800": False, "801": True}


def test_seven_actions_are_chunks_of_three_three_and_one(decided: dict[str, Any]) -> None:
    assert decided["chunks"] == [[3, None], [3, None], [1, "terminal"]]


def test_first_call_over_the_guard_has_nothing_to_close(decided: dict[str, Any]) -> None:
    assert decided["first_call_can_close"] is False


def test_initial_and_pending_images_stay_beside_the_last_ones(decided: dict[str, Any]) -> None:
    assert decided["kept_images"]["2"] == {"images": ["i0", "i3", "i4"], "markers": 1}


def test_window_of_no_images_keeps_the_initial_and_the_pending_one(decided: dict[str, Any]) -> None:
    assert decided["kept_images"]["0"] == {"images": ["i0", "i4"], "markers": 1}
