"""Every epoch draws every prompt once, in an order fixed by seed and epoch."""

from hypothesis import given
from hypothesis import strategies as st

from activities.rollouts.prompt_order import row_of_position

ROWS = st.integers(min_value=1, max_value=200)
SEEDS = st.integers(min_value=0, max_value=2**40)


def epoch_of(rows: int, seed: int, epoch: int) -> list[int]:
    return [row_of_position(epoch * rows + place, rows, seed) for place in range(rows)]


@given(ROWS, SEEDS, st.integers(min_value=0, max_value=1000))
def test_every_epoch_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(rows, seed, epoch)) == list(range(rows))


def test_order_is_the_same_in_every_release() -> None:
    assert epoch_of(8, 42, 0) == [1, 2, 5, 7, 6, 0, 3, 4]
    assert epoch_of(8, 42, 1) == [4, 0, 7, 1, 2, 6, 3, 5]


@given(SEEDS, st.integers(min_value=0, max_value=100))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, epoch: int) -> None:
    assert epoch_of(100, seed, epoch) != epoch_of(100, seed, epoch + 1)
    assert epoch_of(100, seed, epoch) != epoch_of(100, seed + 1, epoch)


def test_positions_may_be_asked_in_any_order() -> None:
    forwards = [row_of_position(position, 7, 1) for position in range(70)]
    backwards = [row_of_position(position, 7, 1) for position in reversed(range(70))]
    assert forwards == backwards[::-1]
