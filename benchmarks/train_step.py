"""Engine.train against a plain loop with transformers and AdamW: same weights, batches, micro-batches and maths.

    .venvs/onbelay/bin/python -m benchmarks.train_step [--steps N] [--threads N] [--json OUT]

Both take the clipped GRPO loss without a KL term, clip the gradient and step AdamW, on the same padded micro-batches,
taking turns. The ratio is the median over turns of the plain loop's seconds divided by the engine's; above 1 the engine
is faster. A second table says what the engine's steps spend their time on, and what a KL term would add.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.pipeline_parallel import schedules
from transformers import AutoModelForCausalLM

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.megatron import passes
from activities.training.megatron.engine import Engine
from activities.training.microbatches import micro_batches
from benchmarks.larger_policy import write_larger_policy
from configs.grpo import GrpoConfig, LossConfig
from configs.training import TrainingConfig
from workers.demo.model import build_model
from workers.demo.tokenizer import build_tokenizer

RATE = 1e-4
LOSS = LossConfig(reference_policy_kl_penalty=0.0)


@dataclass(frozen=True)
class Case:
    """A model and rows for it. Lengths are tokens of a row, lowest and highest."""

    name: str
    rows: int
    rows_per_pass: int
    lengths: tuple[int, int]


CASES = (Case("demo", 24, 8, (100, 250)), Case("larger", 12, 4, (200, 500)))


@dataclass(frozen=True)
class Result:
    """Medians of one case. `share` is of the engine's step."""

    case: str
    parameters: int
    tokens: int
    engine_tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float
    share: dict[str, float]
    kl_ratio: float
    """Seconds of a step with a KL term over those of one without: the reference pass."""


def write_policy(case: Case, folder: Path) -> int:
    """A Hugging Face folder for the engine; returns the model's parameters."""
    if case.name == "larger":
        return write_larger_policy(folder)
    words = build_tokenizer()
    model = build_model(words, 0)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(case: Case) -> TrainingBatch:
    """Rows of which every fourth token was sampled."""
    draw = np.random.default_rng(0)
    rows: list[TrainingRow] = []
    for index in range(case.rows):
        tokens = int(draw.integers(*case.lengths))
        mask = (np.arange(tokens) % 4 == 3).astype(np.uint8)
        rows.append(
            TrainingRow(
                rollout_id=f"benchmark/step-0/group-0/rollout-{index}",
                segment=0,
                tokens=draw.integers(0, 100, tokens).astype(np.int32),
                loss_mask=mask,
                log_probs=(mask * -4.85).astype(np.float32),
                advantage=float(draw.normal()),
            )
        )
    return TrainingBatch("benchmark", 0, tuple(rows))


def new_engine(case: Case, folder: Path, threads: int, loss: LossConfig = LOSS) -> Engine:
    """An engine at version 0."""
    training = TrainingConfig(lr=RATE, threads=threads, train_micro_batch_size=case.rows_per_pass)
    engine = Engine(training, GrpoConfig(loss_fn=loss, seed=0))
    engine.load_model(folder)
    return engine


def plain_loop(case: Case, folder: Path, batch: TrainingBatch) -> Callable[[], object]:
    """A step with transformers and AdamW."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        micros = micro_batches(
            batch,
            rows_per_pass=case.rows_per_pass,
            max_tokens=TrainingConfig().train_micro_batch_tokens,
            token_level=True,
            data_parallel_size=1,
            data_parallel_rank=0,
            device=torch.device("cpu"),
        )
        for micro in micros:
            logits = model(input_ids=micro.tokens, use_cache=False).logits
            nll = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), micro.labels.flatten(), reduction="none"
            ).view_as(micro.loss_mask)
            curr = -nll
            ratio = torch.exp(curr - curr.detach())
            clipped = ratio.clamp(1 - LOSS.ratio_clip_min, 1 + LOSS.ratio_clip_max)
            loss = torch.maximum(-micro.advantages * ratio, -micro.advantages * clipped)
            ((loss * micro.loss_mask).sum() / batch.trained_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.use_deterministic_algorithms(True)

    return step


def take_turns(candidates: list[Callable[[], object]], turns: int) -> list[list[float]]:
    """Seconds of each turn of each candidate, after one turn to warm up."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for turn in range(turns + 1):
        for index in range(len(candidates)):
            place = (index + turn) % len(candidates)  # who goes first changes
            started = time.perf_counter()
            candidates[place]()
            seconds[place].append(time.perf_counter() - started)
    return [values[1:] for values in seconds]


@contextmanager
def stopwatches(places: dict[str, tuple[Any, str]], seconds: dict[str, float]) -> Iterator[None]:
    """Add up what calls of the functions at these places take."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

        return call

    patches = [patch.object(owner, key, timed(name, getattr(owner, key))) for name, (owner, key) in places.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def where_it_goes(engine: Engine, batch: TrainingBatch, turns: int) -> dict[str, float]:
    """Shares of a step of the engine, by part."""
    policy: Any = engine._policy
    places = {
        "forward": (passes, "_forward"),
        "loss": (passes, "grpo_loss"),
        "row facts": (passes, "row_facts"),
        "backward": (schedules, "backward_step"),
        "all-reduce and scaling of gradients": (policy.model.config, "finalize_model_grads_func"),
    }
    seconds: dict[str, float] = {}
    total = 0.0
    with stopwatches(places, seconds):
        for _ in range(turns):
            started = time.perf_counter()
            metrics = engine.train(batch)
            total += time.perf_counter() - started
            for phase in ("training_prep", "optimizer"):
                seconds[phase] = seconds.get(phase, 0.0) + metrics[f"timing/{phase}"]
    share = {name: value / total for name, value in seconds.items()}
    return share | {"everything else": 1.0 - sum(share.values())}


def measure(case: Case, turns: int, threads: int) -> Result:
    """One case, both loops in turns."""
    torch.set_num_threads(threads)
    batch = make_batch(case)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        parameters = write_policy(case, folder)
        engine, plain = new_engine(case, folder, threads), plain_loop(case, folder, batch)
        ours, theirs = take_turns([lambda: engine.train(batch), plain], turns)
        share = where_it_goes(engine, batch, max(2, turns // 4))
        with_kl = new_engine(case, folder, threads, LossConfig(reference_policy_kl_penalty=0.01))
        kl, without = take_turns([lambda: with_kl.train(batch), lambda: engine.train(batch)], max(2, turns // 4))
    tokens = sum(len(row.tokens) for row in batch.rows)
    return Result(
        case=case.name,
        parameters=parameters,
        tokens=tokens,
        engine_tokens_per_s=tokens / statistics.median(ours),
        plain_tokens_per_s=tokens / statistics.median(theirs),
        ratio=statistics.median(their / our for our, their in zip(ours, theirs, strict=True)),
        share=share,
        kl_ratio=statistics.median(a / b for a, b in zip(kl, without, strict=True)),
    )


def show(result: Result) -> None:
    """Print one case."""
    print(
        f"{result.case}: {result.parameters:,} parameters, {result.tokens:,} tokens a step\n"
        f"  engine {result.engine_tokens_per_s:9,.0f} tokens/s\n"
        f"  plain  {result.plain_tokens_per_s:9,.0f} tokens/s\n"
        f"  ratio  {result.ratio:9.2f}\n"
        f"  a KL term makes a step {result.kl_ratio:.2f} times as long\n"
        "  where the engine's step goes:"
    )
    for name, share in sorted(result.share.items(), key=lambda item: -item[1]):
        print(f"    {share:6.1%}  {name}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="turns of each loop")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    results: list[Result] = []
    for case in CASES:
        if args.case is None or case.name in args.case:
            results.append(measure(case, args.steps, args.threads))
            show(results[-1])
    if args.json is not None:
        document = {"threads": args.threads, "steps": args.steps, "cases": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
