"""The picture of a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from workers.metrics.plot import moving_mean, plot_run


@pytest.mark.parametrize("steps", [0, 1, 3, 40])
def test_a_run_of_any_length_gives_a_picture(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "new" / "reward.png"

    plot_run(path, [0.5] * steps, [0.1] * steps, "run", {0: 0.4, steps: 0.6})

    height, width, _ = imread(path).shape
    assert (width, height) == (1260, 910)
    assert [file.name for file in path.parent.iterdir()] == ["reward.png"]


def test_evaluations_are_drawn(tmp_path: Path) -> None:
    plot_run(tmp_path / "without.png", [0.1, 0.9], [0.1, 0.2], "run")
    plot_run(tmp_path / "with.png", [0.1, 0.9], [0.1, 0.2], "run", {0: 0.4})

    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_moving_mean_looks_back_only() -> None:
    assert moving_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


@given(st.lists(st.floats(min_value=-1e6, max_value=1e6)), st.integers(min_value=1, max_value=9))
def test_moving_mean_stays_within_the_values(values: list[float], window: int) -> None:
    means = moving_mean(values, window)

    assert len(means) == len(values)
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for mean in means)
