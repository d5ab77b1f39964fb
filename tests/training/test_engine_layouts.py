"""Every parallel layout trains what one rank trains, and goes on after a stop as if there had been none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.layouts import carry_out, job, prepare, results, trained, weights
from tests.training.run_steps import Action, Job, Order
from tests.training.samples import differing, greatest_difference, make_batch, write_model

pytestmark = pytest.mark.integration

DATA, TENSOR, PIPELINE = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
DISTRIBUTED = {"use_distributed_optimizer": True}
BFLOAT16 = {"dtype": "bfloat16"}
# Settings by name; those of one group run in the same processes.
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"one": {}, "one-distributed": DISTRIBUTED},
    "data": {
        "data": {DATA: 2},
        "data-distributed": {DATA: 2} | DISTRIBUTED,
        "data-bfloat16": {DATA: 2} | BFLOAT16,
        "data-distributed-bfloat16": {DATA: 2} | DISTRIBUTED | BFLOAT16,
    },
    "tensor": {"tensor": {TENSOR: 2}, "tensor-distributed": {TENSOR: 2} | DISTRIBUTED},
    "pipeline": {"pipeline": {PIPELINE: 2}, "pipeline-distributed": {PIPELINE: 2} | DISTRIBUTED},
    "data-tensor": {
        "data-tensor": {DATA: 2, TENSOR: 2},
        "data-tensor-distributed": {DATA: 2, TENSOR: 2} | DISTRIBUTED,
    },
}
STEPS, STOP = 4, 2
DRAWS = 3
# Two layouts sum the same gradient in another order, so it differs by float32's noise, about 1e-7 of the terms summed.
# Adam's first steps are rate * g / (|g| + eps): free of that noise where |g| is well above eps = 1e-8, and off by up to
# the rate, 1e-3, where |g| is near it. Few weights come near (8e-7 was measured), so the bound is a fiftieth of a rate:
# a gradient that is wrong in any layout, by a factor or a missing share, moves weights by about a whole one.
ADAM_NOISE = 2e-5


@dataclass(frozen=True)
class Runs:
    """One layout: a run without a stop, one until it stops, and one that goes on from its checkpoint."""

    straight: Job
    stopped: Job
    resumed: Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with per-head norms, and the batches of four steps."""
    prepare()
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", "qwen3-tied")
    for step in range(STEPS):
        batch_file(folder, step).write_bytes(make_batch(step).to_bytes())
    return folder


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"batch-{step}"


def train(folder: Path, steps: range) -> list[Action]:
    return [Action(do="train", path=batch_file(folder, step)) for step in steps]


def runs_of(folder: Path, name: str, layout: dict[str, Any]) -> Runs:
    def made(kind: str, *actions: Action) -> Job:
        return job(folder / f"{name}-{kind}", folder / "model", layout, list(actions), {})

    checkpoint = folder / f"{name}-checkpoint"
    export = [Action(do="export", path=folder / f"{name}-{kind}-weights") for kind in ("first", "straight", "resumed")]
    load_model, draw = Action(do="load_model"), Action(do="draw", draws=DRAWS)
    first, others = train(folder, range(1)), train(folder, range(1, STEPS))
    return Runs(
        straight=made("straight", load_model, *first, export[0], *others, export[1]),
        stopped=made(
            "stopped", load_model, *train(folder, range(STOP)), draw, Action(do="save", path=checkpoint), draw
        ),
        resumed=made(
            "resumed", Action(do="load", path=checkpoint), draw, *train(folder, range(STOP, STEPS)), export[2]
        ),
    )


def all_runs(folder: Path, group: str) -> dict[str, Runs]:
    """Train the layouts of a group; they stop by the end of their processes and go on in new ones."""
    runs = {name: runs_of(folder, name, layout) for name, layout in GROUPS[group].items()}
    ranks = next(iter(runs.values())).straight.training.world_size
    before = [made for run in runs.values() for made in (run.straight, run.stopped)]
    carry_out(Order(ranks=ranks, log=folder / f"{group}-before", jobs=before))
    carry_out(Order(ranks=ranks, log=folder / f"{group}-after", jobs=[run.resumed for run in runs.values()]))
    return runs


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Runs]:
    return all_runs(folder, "one")


@pytest.fixture(scope="module", params=GROUPS)
def runs(request: pytest.FixtureRequest, folder: Path, one: dict[str, Runs]) -> dict[str, Runs]:
    return one if request.param == "one" else all_runs(folder, request.param)


def exports(run: Job) -> list[Path]:
    return [action.path for action in run.actions if action.do == "export" and action.path is not None]


def test_ranks_train_what_one_rank_trains(runs: dict[str, Runs], one: dict[str, Runs]) -> None:
    expected = one["one"].straight
    expected_metrics, expected_weights = trained(expected)[0], [weights(path) for path in exports(expected)]
    for run in (run.straight for run in runs.values() if run.straight.training.dtype == "float32"):
        for metrics in trained(run):
            for step, known in zip(metrics, expected_metrics, strict=True):
                assert step["loss"] == pytest.approx(known["loss"], abs=1e-6)
                assert without_work(step) == pytest.approx(without_work(known), rel=1e-4, abs=1e-6)
        for path, known in zip(exports(run), expected_weights, strict=True):
            assert greatest_difference(weights(path), known) < ADAM_NOISE


def without_work(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that say what was trained; the others say how the rows were divided for it."""
    return {key: value for key, value in metrics.items() if key not in ("micro_batches", "padding_rows")}


def test_all_ranks_return_the_same_metrics(runs: dict[str, Runs]) -> None:
    for run in runs.values():
        first, *others = trained(run.straight)
        assert all(other == first for other in others)


def test_a_run_that_goes_on_in_new_processes_is_bit_identical_to_one_that_never_stopped(runs: dict[str, Runs]) -> None:
    for name, run in runs.items():
        straight, resumed = weights(exports(run.straight)[-1]), weights(exports(run.resumed)[-1])
        assert differing(straight, resumed) == [], name
        assert trained(run.resumed) == [metrics[STOP:] for metrics in trained(run.straight)]
        assert [rank[0] for rank in results(run.resumed)] == [STOP] * run.resumed.training.world_size


def test_a_resumed_rank_draws_what_it_would_have_drawn(runs: dict[str, Runs]) -> None:
    for run in runs.values():
        for rank, (stopped, resumed) in enumerate(zip(results(run.stopped), results(run.resumed), strict=True)):
            assert len(resumed[1]) == DRAWS + rank
            assert resumed[1] == stopped[-1]
            assert resumed[1] != stopped[-3]


def test_a_checkpoint_of_another_layout_is_refused_by_all_ranks(folder: Path, one: dict[str, Runs]) -> None:
    checkpoint = one["one"].stopped.actions[-2].path
    refused = Action(do="load", path=checkpoint, fails=True)
    jobs = [
        job(folder / f"refused-{name}", folder / "model", GROUPS["data"][name], [refused], {})
        for name in ("data", "data-distributed")
    ]

    carry_out(Order(ranks=2, log=folder / "refused", jobs=jobs))

    for refusal in jobs:
        for (error,) in results(refusal):
            assert str(checkpoint) in error
            assert "tensor 1 x pipeline 1 x data 1, float32, plain optimizer" in error
            assert "tensor 1 x pipeline 1 x data 2, float32" in error


# Rank 0 writes two files of weights, the index, digests four files, and writes the manifest; rank 1 has a part of it.
@pytest.mark.parametrize(("rank", "files"), [(0, 8), (1, 5)])
def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all_and_the_next_save_works(
    folder: Path, tmp_path: Path, rank: int, files: int
) -> None:
    place, weights_place = tmp_path / "place" / "checkpoint", tmp_path / "place" / "weights"
    actions = [
        Action(do="load_model"),
        *train(folder, range(1)),
        Action(do="export", path=weights_place, full_disk_on=0, fails=True),
        *(Action(do="save", path=place, full_disk_on=rank, files_before=i, fails=True) for i in range(files)),
        Action(do="save", path=place),
        Action(do="load", path=place),
        Action(do="export", path=weights_place),
    ]
    filled = job(tmp_path / "output", folder / "model", {DATA: 2} | DISTRIBUTED, actions, {})

    carry_out(Order(ranks=2, log=tmp_path / "order", jobs=[filled]))

    for _, _, exported, *saved, _, loaded, _ in results(filled):
        assert exported.startswith("OSError: rank 0: ")
        assert "No space left on device" in exported
        assert len(saved) == files
        for error in saved:
            assert error.startswith(f"CheckpointError: The checkpoint {place} could not be written")
            assert "No space left on device" in error
        assert loaded == 1
    assert sorted(path.name for path in place.parent.iterdir()) == ["checkpoint", "weights"]


def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_replaced_by_the_next_save(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    write = job(
        tmp_path / "write",
        folder / "model",
        {DATA: 2},
        [Action(do="load_model"), Action(do="save", path=checkpoint)],
        {},
    )
    carry_out(Order(ranks=2, log=tmp_path / "writing", jobs=[write]))
    damaged = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    actions = [
        Action(do="load", path=checkpoint, fails=True),
        Action(do="load_model"),
        Action(do="save", path=checkpoint),
        Action(do="load", path=checkpoint),
    ]
    read = job(tmp_path / "read", folder / "model", {DATA: 2}, actions, {})

    carry_out(Order(ranks=2, log=tmp_path / "reading", jobs=[read]))

    for error, *_ in results(read):
        assert error.startswith(f"CheckpointError: {damaged} has sha256")
