"""Which attempt replays what: the same sample after a failure of the infrastructure, else a fresh one with a reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import RecoveryRefused
from storage.records import BegunAttempt, Bucket, Recovery, WeightSpan
from storage.samples import PreviousAttempt, next_attempt
from tests.storage.building import Story

VERSION_3 = (WeightSpan(version="policy-3", start=0, end=1), WeightSpan(version="policy-4", start=1, end=2))


def previous(
    oldest_version: int | None = 3, bucket: Bucket | None = None, failure_class: str | None = None
) -> PreviousAttempt:
    return PreviousAttempt(4, 1, bucket, failure_class, 9, oldest_version)


def test_first_attempt_begins_sample_0() -> None:
    assert next_attempt("r", None, "none", 5, 0) == BegunAttempt(attempt=0, sample=0, recorded=0, fresh_reason=None)


def test_attempt_after_a_failure_of_the_infrastructure_continues_the_sample() -> None:
    begun = next_attempt("r", previous(bucket="infra", failure_class="HTTP_500"), "replay", 3, 0)
    assert begun == BegunAttempt(attempt=5, sample=1, recorded=9, fresh_reason=None)


@pytest.mark.parametrize(
    ("before", "recovery", "policy_version", "reason"),
    [
        (previous(), "fresh", 3, "recovery: fresh"),
        (previous(bucket="data", failure_class="NoGeneration"), "replay", 3, "after a data failure: NoGeneration"),
        (
            previous(),
            "replay",
            6,
            "a recorded response is of policy version 3, the attempt of 6: more than 2 apart "
            "(rollouts.max_replay_age_versions)",
        ),
    ],
)
def test_fresh_sample_has_nothing_to_replay_and_says_why(
    before: PreviousAttempt, recovery: Recovery, policy_version: int, reason: str
) -> None:
    begun = next_attempt("r", before, recovery, policy_version, 2)
    assert begun == BegunAttempt(attempt=5, sample=2, recorded=0, fresh_reason=reason)


def test_second_attempt_is_refused_where_tools_must_not_run_twice() -> None:
    with pytest.raises(RecoveryRefused, match=r"'run/rollout-0' was begun by attempt 4"):
        next_attempt("run/rollout-0", previous(), "none", 3, 0)


@pytest.mark.parametrize(("generated_under", "replayed"), [(3, False), (4, True), (5, True)])
def test_step_5_replays_what_is_at_most_one_version_old(generated_under: int, replayed: bool) -> None:
    begun = next_attempt("r", previous(generated_under), "replay", 5, 1)
    assert (begun.fresh_reason is None) == replayed


def test_operator_asks_for_a_fresh_sample_once() -> None:
    fresh = next_attempt("r", previous(), "replay", 3, 2, fresh_after=4)
    assert fresh == BegunAttempt(attempt=5, sample=2, recorded=0, fresh_reason="an operator asked for a fresh sample")
    assert next_attempt("r", previous(), "replay", 3, 2, fresh_after=3).fresh_reason is None
    assert next_attempt("r", None, "replay", 3, 2, fresh_after=0).fresh_reason is None
    with pytest.raises(RecoveryRefused):
        next_attempt("r", previous(), "none", 3, 2, fresh_after=4)


@pytest.mark.parametrize("recovery", ["replay", "fresh"])
def test_copy_replays_what_was_copied_however_old_and_whatever_the_recipe_says(recovery: Recovery) -> None:
    copied = replace(previous(), diagnostic=True, copied=True)
    assert next_attempt("r", copied, recovery, 50, 0) == BegunAttempt(
        attempt=5, sample=1, recorded=9, fresh_reason=None
    )


def test_later_attempt_of_a_copy_is_fresh_after_a_failure_of_its_own_data_but_never_for_its_age() -> None:
    own = replace(previous(), diagnostic=True)
    assert next_attempt("r", own, "replay", 50, 0).fresh_reason is None
    failed = replace(own, bucket="data", failure_class="NoGeneration")
    assert next_attempt("r", failed, "replay", 50, 0).fresh_reason == "after a data failure: NoGeneration"


def test_copy_of_what_must_not_run_twice_is_refused() -> None:
    with pytest.raises(RecoveryRefused):
        next_attempt("r", replace(previous(), diagnostic=True, copied=True), "none", 3, 0)


@given(oldest=st.integers(0, 100), policy_version=st.integers(0, 100), limit=st.integers(0, 10))
def test_responses_are_replayed_up_to_the_age_limit(oldest: int, policy_version: int, limit: int) -> None:
    begun = next_attempt("r", previous(oldest), "replay", policy_version, limit)
    assert (begun.fresh_reason is None) == (policy_version - oldest <= limit)


def test_sample_without_known_versions_is_replayed() -> None:
    assert next_attempt("r", previous(None), "replay", 50, 0).fresh_reason is None


@pytest.mark.integration
async def test_begun_attempt_counts_what_it_may_replay(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0, fingerprint="first", weight_versions=VERSION_3)
    await story.generate(rollout_id, 0, fingerprint="second", weight_versions=VERSION_3)

    assert await story.try_to_begin(rollout_id, policy_version=3) == BegunAttempt(
        attempt=1, sample=0, recorded=2, fresh_reason=None
    )


@pytest.mark.integration
async def test_oldest_span_of_the_sample_decides_its_age(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0, fingerprint="first", weight_versions=VERSION_3)

    begun = await story.try_to_begin(rollout_id, policy_version=4)

    assert isinstance(begun, BegunAttempt)
    assert (begun.sample, begun.recorded) == (1, 0)
    assert begun.fresh_reason is not None
    assert begun.fresh_reason.startswith("a recorded response is of policy version 3")
    group = await story.ledger.groups.get(story.group_id(0, 0))
    assert [(one.sample, one.fresh_reason) for one in group.rollouts[0].attempts] == [
        (0, None),
        (1, begun.fresh_reason),
    ]


@pytest.mark.integration
async def test_data_failure_begins_a_fresh_sample_and_the_next_failure_replays_that_one(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0)
    await story.ledger.rollouts.fail_attempt(rollout_id, 0, "model", "data", "NoGeneration", "no tokens")

    fresh = await story.try_to_begin(rollout_id)
    await story.generate(rollout_id, 1)
    again = await story.try_to_begin(rollout_id)

    assert fresh == BegunAttempt(attempt=1, sample=1, recorded=0, fresh_reason="after a data failure: NoGeneration")
    assert again == BegunAttempt(attempt=2, sample=1, recorded=1, fresh_reason=None)


@pytest.mark.integration
async def test_refused_recovery_changes_nothing(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.try_to_begin(rollout_id, recovery="none")

    with pytest.raises(RecoveryRefused):
        await story.try_to_begin(rollout_id, recovery="none")

    group = await story.ledger.groups.get(story.group_id(0, 0))
    assert [attempt.state for attempt in group.rollouts[0].attempts] == ["running"]


@pytest.mark.integration
async def test_fresh_sample_of_an_operator_is_what_later_attempts_replay(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0)

    fresh = await story.try_to_begin(rollout_id, fresh_after=0)
    await story.generate(rollout_id, 1)
    again = await story.try_to_begin(rollout_id, fresh_after=0)

    assert fresh == BegunAttempt(attempt=1, sample=1, recorded=0, fresh_reason="an operator asked for a fresh sample")
    assert again == BegunAttempt(attempt=2, sample=1, recorded=1, fresh_reason=None)
    assert await story.ledger.checks.of(story.run_id) == []
