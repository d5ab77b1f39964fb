"""The catalogue names exactly what the trainer, the workflow and the ledger give, and the document what it names."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from activities.metrics.catalogue import ALWAYS, CATALOGUE, LEDGER, TRAINER, WORKFLOW, is_known
from activities.metrics.document import DOCUMENT, markdown
from activities.metrics.step_values import step_values
from storage.step_statistics import BatchStatistics, Retries, RolloutStatistics, RunCounters, StepStatistics
from tests.training.test_engine_steps import METRICS
from workflows.step_training import metric_name

WORKFLOWS = Path(__file__).parent.parent.parent / "workflows"
NAME = re.compile(r"(train|timing/train)/[a-z_]+")


def rollout(**more: object) -> RolloutStatistics:
    values = {name: 1 for name, field in RolloutStatistics.model_fields.items() if field.annotation is int}
    return RolloutStatistics.model_validate(
        {**values, "state": "valid", "answered": True, "truncated": False, "reward": 1.0, "poisoned": False, **more}
    )


def test_no_name_is_there_twice() -> None:
    assert [name for name, count in Counter(metric.name for metric in CATALOGUE).items() if count > 1] == []


def test_every_metric_says_what_it_means() -> None:
    assert [metric.name for metric in CATALOGUE if not metric.meaning] == []


def test_trainer_measures_what_the_catalogue_has_of_it() -> None:
    named = {metric_name(name) for name in METRICS}
    assert named == {metric.name for metric in TRAINER} | {"train/consumed_rollouts"}


def test_workflow_names_what_the_catalogue_has_of_it() -> None:
    texts = {
        node.value
        for file in WORKFLOWS.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }
    assert {name for name in texts if not is_known(name)} == set()
    assert {metric.name for metric in WORKFLOW} <= texts


def test_ledger_gives_what_the_catalogue_has_of_it() -> None:
    read = StepStatistics(
        batch=BatchStatistics(rows=1, rollouts=1, trained_tokens=1, segments_max=1),
        rollouts=(rollout(row_index=0), rollout(row_index=1, state="lost", answered=False, reward=None)),
        run=RunCounters.model_validate(dict.fromkeys(RunCounters.model_fields, 1)),
        retries=(
            Retries(bucket="infra", failure_class="AgentFailed", count=2),
            Retries(bucket="data", failure_class="EnvironmentRefused", count=3),
        ),
    )
    values = step_values(read, {0: "climber", 1: "belayer"}, {}, ranks=1, prompts=1)
    filled = {
        metric.name.format(agent=agent, failure_class=failure)
        for metric in LEDGER
        for agent in ("climber", "belayer")
        for failure in ("AgentFailed", "EnvironmentRefused")
    }
    never = {"rollout/redispatch_total/EnvironmentRefused", "rollout/data_retry_total/AgentFailed"}
    assert values.keys() == filled - never
    assert values["rollout/gym_row_redispatch_total"] == 5


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("train/loss", True),
        ("swe/agent/reward/mean", True),
        ("rollout/redispatch_total/AgentFailed", True),
        ("rollout/redispatch_total/", False),
        ("train/losses", False),
        ("reward", False),
        ("{agent}/reward", False),
    ],
)
def test_names_of_the_catalogue_are_known_and_no_others(name: str, known: bool) -> None:
    assert is_known(name) is known


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == markdown(), "run `python -m activities.metrics.document`"


def test_every_name_is_in_the_document() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in ALWAYS if f"| `{name}` |" not in text] == []
