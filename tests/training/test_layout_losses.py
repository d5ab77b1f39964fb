"""What looks at whole rows or rollouts, or at one bad row, comes out the same when ranks share rows or weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from activities.training.batch import TrainingBatch
from configs.grpo import LossConfig
from tests.training.layouts import carry_out, job, prepare, results, trained, weights
from tests.training.run_steps import Action, Job, Order
from tests.training.samples import differing, greatest_difference, make_batch, off_by, write_model

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data": {"data_parallel_size": 2, "use_distributed_optimizer": True},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
CORRECTED = {"reference_policy_kl_penalty": 0.1, "use_importance_sampling_correction": True}
LOSSES: dict[str, dict[str, Any]] = {
    "row filter": {"seq_logprob_error_threshold": 1.65},
    "rollouts": {"loss_fn": LossConfig(token_level_loss=False, **CORRECTED)},
    "rollouts and row filter": {
        "seq_logprob_error_threshold": 1.65,
        "loss_fn": LossConfig(token_level_loss=False, **CORRECTED),
    },
    "ratios of rows": {
        "loss_fn": LossConfig(
            sequence_level_importance_ratios=True,
            token_level_loss=False,
            truncated_importance_sampling_type="tis",
            truncated_importance_sampling_ratio=1.1,
            **CORRECTED,
        )
    },
    "mask of rows": {
        "loss_fn": LossConfig(
            truncated_importance_sampling_type="seq-mask-tis",
            truncated_importance_sampling_ratio=1.1,
            truncated_importance_sampling_ratio_min=0.9,
            **CORRECTED,
        )
    },
}
SICK = {"loss": "loss", "gradient": "finite loss, but the gradient norm"}
ADAM_NOISE = 2e-5  # see test_engine_layouts


def with_advantages(batch: TrainingBatch, advantages: dict[int, float]) -> TrainingBatch:
    rows = list(batch.rows)
    for i, advantage in advantages.items():
        rows[i] = dataclasses.replace(rows[i], advantage=advantage)
    return dataclasses.replace(batch, rows=tuple(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, good batches, one whose loss is not finite, and one whose gradient is not."""
    prepare()
    folder = tmp_path_factory.mktemp("layout-losses")
    write_model(folder / "model", "qwen3-tied")
    for step in range(3):
        (folder / f"batch-{step}").write_bytes(make_batch(step).to_bytes())
    loss = with_advantages(off_by(make_batch(1), 3, -83.0), {3: 1e9})
    (folder / "sick-loss").write_bytes(loss.to_bytes())
    (folder / "sick-gradient").write_bytes(with_advantages(make_batch(1), {1: 1e30, 4: -1e30}).to_bytes())
    return folder


def train(folder: Path, name: str, *, fails: bool = False) -> Action:
    return Action(do="train", path=folder / name, fails=fails)


def all_jobs(folder: Path, layout: str) -> dict[str, Job]:
    """Two steps with each loss; a step, a sick batch, a step; and the same without the sick batch."""
    jobs: dict[str, Job] = {}
    cases: dict[str, tuple[dict[str, Any], list[Action]]] = {
        name: (grpo, [train(folder, "batch-0"), train(folder, "batch-1")]) for name, grpo in LOSSES.items()
    }
    plain = {"loss_fn": LossConfig(**CORRECTED)}
    before, after = train(folder, "batch-0"), train(folder, "batch-2")
    cases["healthy"] = (plain, [before, after])
    for name in SICK:
        cases[name] = (plain, [before, train(folder, f"sick-{name}", fails=True), after])
    for name, (grpo, actions) in cases.items():
        output = folder / f"{layout}-{name}"
        export = Action(do="export", path=folder / f"{layout}-{name}-weights")
        jobs[name] = job(output, folder / "model", LAYOUTS[layout], [Action(do="load_model"), *actions, export], grpo)
    ranks = jobs["healthy"].training.world_size
    carry_out(Order(ranks=ranks, log=folder / f"{layout}-order", jobs=list(jobs.values())))
    return jobs


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Job]:
    return all_jobs(folder, "one")


@pytest.fixture(scope="module", params=[name for name in LAYOUTS if name != "one"])
def jobs(request: pytest.FixtureRequest, folder: Path) -> dict[str, Job]:
    return all_jobs(folder, request.param)


def exported(done: Job) -> Path:
    path = done.actions[-1].path
    assert path is not None
    return path


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_rows_and_rollouts_is_that_of_one_rank(
    jobs: dict[str, Job], one: dict[str, Job], name: str
) -> None:
    known = trained(one[name])[0]
    for metrics in trained(jobs[name]):
        for step, of_one in zip(metrics, known, strict=True):
            for work in ("micro_batches", "padding_rows"):
                del step[work]
            assert step["loss"] == pytest.approx(of_one["loss"], abs=1e-6)
            assert step == pytest.approx({key: of_one[key] for key in step}, rel=1e-4, abs=1e-6)
    assert greatest_difference(weights(exported(jobs[name])), weights(exported(one[name]))) < ADAM_NOISE


def test_the_filter_drops_rows_and_the_losses_differ(one: dict[str, Job]) -> None:
    steps = {name: trained(one[name])[0][0] for name in LOSSES}

    assert 0 < steps["row filter"]["num_masked_seqs_by_logprob_error"] < 7
    assert steps["rollouts"]["num_masked_seqs_by_logprob_error"] == 0
    assert len({step["loss"] for step in steps.values()}) == len(LOSSES)


@pytest.mark.parametrize("name", SICK)
def test_all_ranks_refuse_a_sick_batch_with_the_same_words_and_go_on_as_if_it_had_not_been(
    jobs: dict[str, Job], one: dict[str, Job], name: str
) -> None:
    errors = {of_rank[2] for of_rank in results(jobs[name])}
    sick = ("rollout-1, segment 1",) if name == "loss" else ("rollout-0, segment 1", "rollout-2, segment 0")

    assert len(errors) == 1
    (error,) = errors
    assert error.startswith("NonFiniteStep: Step 1 of run run gives ")
    assert SICK[name] in error
    assert all(f"run/step-1/group-0/{row}" in error for row in sick)
    assert error.count("run/step-1/group-0/") == len(sick)
    healthy = jobs["healthy"]
    assert differing(weights(exported(jobs[name])), weights(exported(healthy))) == []
    assert [steps[1] for steps in trained(jobs[name])] == [steps[1] for steps in trained(healthy)]
    assert results(one[name])[0][2].split(" The weights")[0].partition(" It comes")[2] in error
