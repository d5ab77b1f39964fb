"""What is kept of checkpoints and exported weights, for every history of a run."""

from hypothesis import given
from hypothesis import strategies as st

from activities.training.retention import expendable_checkpoints, expendable_weights

VERSIONS = st.sets(st.integers(1, 40))


@given(recorded=VERSIONS, damaged=VERSIONS, last=st.integers(1, 5), every=st.integers(0, 6))
def test_the_newest_usable_checkpoints_and_the_milestones_are_kept(
    recorded: set[int], damaged: set[int], last: int, every: int
) -> None:
    usable = recorded - damaged

    gone = expendable_checkpoints(recorded, usable, last, every)

    kept = recorded - set(gone)
    assert set(sorted(usable)[-last:]) <= kept
    assert {version for version in recorded if every and version % every == 0} <= kept
    assert gone == sorted(gone)
    assert set(gone) <= recorded
    older = [version for version in usable & kept if not (every and version % every == 0)]
    assert len(older) <= last
    if usable:
        assert all(version >= min(sorted(usable)[-last:]) for version in kept if not (every and version % every == 0))
    else:
        assert not gone


@given(versions=st.lists(st.integers(1, 60), unique=True), last=st.integers(1, 4), every=st.integers(0, 7))
def test_a_milestone_is_kept_for_good_however_the_run_goes_on(versions: list[int], last: int, every: int) -> None:
    there: set[int] = set()
    saved = sorted(versions)
    for version in saved:
        there.add(version)
        there -= set(expendable_checkpoints(there, there, last, every))
    assert there == set(saved[-last:]) | {version for version in saved if every and version % every == 0}


EXPORTS = st.dictionaries(st.tuples(st.integers(0, 9), st.integers(1, 9)), st.just(None), min_size=1)


@given(made=EXPORTS, last=st.integers(1, 4), which=st.integers(0, 80))
def test_exports_of_the_newest_versions_are_kept_and_none_of_a_later_trainer_is_touched(
    made: dict[tuple[int, int], None], last: int, which: int
) -> None:
    exports = {f"policy-{version}-lease-{token}": (version, token) for version, token in made}
    current = sorted(exports)[which % len(exports)]

    gone = expendable_weights(exports, current, last)

    kept = set(exports) - set(gone)
    newest = sorted({version for version, _ in made})[-last:]
    assert current in kept
    assert {version for version, _ in map(exports.__getitem__, kept)} >= set(newest)
    assert all(exports[name][1] <= exports[current][1] for name in gone)
    if exports[current][1] == max(token for _, token in made):
        assert len(kept - {current}) <= last
