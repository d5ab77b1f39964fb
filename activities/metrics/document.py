"""docs/metrics.md, made from the catalogue.

`python -m activities.metrics.document` writes it; a test fails when it is stale.
"""

from collections.abc import Iterable
from pathlib import Path

from activities.metrics import catalogue
from activities.metrics.catalogue import LEDGER, TRAINER, WORKFLOW, Metric

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"

_HEAD = """\
# Metrics

<!-- Made by `python -m activities.metrics.document` from activities/metrics/catalogue.py. Do not edit. -->

Every recorded step has every metric below, zeros included, so that a curve never has holes. They are in the ledger
(`step_metrics`, kept for ever; what the trainer returned is there under source `trainer`, what a step was recorded with
under `run`), in TensorBoard (`<training.output_dir>/<run>/tensorboard`), and at Weights & Biases if the recipe has
`logger.wandb`.

```console
$ tensorboard --logdir .onbelay/training
$ onbelay run status RUN                      # reward, loss, log-probability gap and seconds of the last steps
```

Is the policy that samples the one that trains? `train/logprob_gap_max` says how far apart vLLM and the trainer are on
the worst token of the step, `train/logprob_gap_mean` on all, `train/logprob_gap_kl` as a divergence. At
`rollouts.max_lookahead_versions: 0` they are rounding errors; a step is refused above `training.max_logprob_gap`.

## Weights & Biases

```yaml
logger:
  wandb:
    project: climbing
    mode: online          # offline: files in <training.output_dir>/<run>/wandb, for `wandb sync --append`
```

A run of Onbelay is one W&B run with its id, and step t of one is step t of the other. The API key comes from
`WANDB_API_KEY`, in the environment of the rollout workers; without it the worker says so and the run goes on. At each
step W&B is asked for the last step that it has, and gets what the ledger has beyond it. So a step that it missed
(unreachable, or `logger.wandb.timeout_s` passed) comes with a later one or at the end of the run, and none comes twice,
whichever worker records it. Between two steps W&B shows the run as finished: each step is a session of its own.
The config of the W&B run are the recipe's `grpo`, `training`, `rollouts` and `failure`. Of the machine and its code no
more is sent than the versions of Python and of W&B's client.
"""

_SECTIONS = (
    ("From the trainer", "Measured while the step is trained; equal on all ranks.", TRAINER),
    ("From the workflow", "Counted and timed by the step itself.", WORKFLOW),
    (
        "From the ledger",
        "Computed as the step is recorded. `{agent}` stands for the agents of the step's prompts, `{failure_class}` "
        "for the classes that occurred. Rewards, turns and tokens are those of valid rollouts.",
        LEDGER,
    ),
)


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, text, metrics in _SECTIONS:
        parts += [f"## {title}", "", text, "", "| name | unit | meaning |", "|---|---|---|", *_rows(metrics), ""]
    return "\n".join([*parts, "## Left out", "", _left_out(), ""])


def _rows(metrics: Iterable[Metric]) -> Iterable[str]:
    for metric in metrics:
        meaning = metric.meaning.replace("|", "\\|")
        yield f"| `{metric.name}` | {metric.unit} | {meaning} |"


def _left_out() -> str:
    """The end of the catalogue's docstring."""
    return (catalogue.__doc__ or "").partition("\n\n")[2].strip()


if __name__ == "__main__":
    DOCUMENT.write_text(markdown())
