"""Golden numbers of context compaction: what NeMo-Gym's agent decides is what our recipes and our segments rely on."""

import json
from typing import Any

import pytest

from tests.gym.forks import Forks


@pytest.fixture(scope="module")
def decided(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The decisions, from the Gym environment."""
    output = forks.output("tests.gym.compaction_goldens", folder=tmp_path_factory.mktemp("goldens"))
    return json.loads(output.splitlines()[-1])


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
