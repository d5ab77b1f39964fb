"""A PNG of a run: mean reward and loss of each step, and the evaluations between them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MEAN_WINDOW_STEPS = 5

_REWARD, _LOSS, _EVALUATION = "#1f6feb", "#b35900", "#1a7f37"


def plot_run(
    path: Path,
    reward_by_step: Sequence[float],
    loss_by_step: Sequence[float],
    title: str,
    evaluations: Mapping[int, float] | None = None,
) -> None:
    """Write the picture. `evaluations` are by policy version: version v is drawn before step v."""
    figure = Figure(figsize=(9, 6.5), dpi=140, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(title, fontsize=13)
    _draw(top, reward_by_step, _REWARD, "mean reward")
    if evaluations:
        versions = sorted(evaluations)
        top.plot(
            [version - 0.5 for version in versions],
            [evaluations[version] for version in versions],
            "D",
            color=_EVALUATION,
            markersize=8,
            markeredgecolor="white",
            label="validation rows, not trained",
            zorder=4,
        )
    _draw(bottom, loss_by_step, _LOSS, "loss")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, bottom):
        axes.legend(loc="best", frameon=False, fontsize=9)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("wb") as stream:
        canvas.print_png(stream)
    temporary.replace(path)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 values before it."""
    spans = (values[max(0, index + 1 - window) : index + 1] for index in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def _draw(axes: Axes, values: Sequence[float], color: str, label: str) -> None:
    steps = range(len(values))
    is_long = len(values) > MEAN_WINDOW_STEPS
    axes.plot(
        steps, values, "o-", color=color, alpha=0.4 if is_long else 1.0, markersize=4, linewidth=1, label="each step"
    )
    if is_long:
        mean = moving_mean(values, MEAN_WINDOW_STEPS)
        axes.plot(steps, mean, color=color, linewidth=2.4, label=f"mean of {MEAN_WINDOW_STEPS} steps")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
