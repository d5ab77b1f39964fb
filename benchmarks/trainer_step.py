"""One optimizer step of the Megatron-core engine against the same step with transformers and AdamW, in one run.

    .venvs/onbelay/bin/python benchmarks/trainer_step.py [STEPS]

Both train the demo-sized policy on the same rows, on one thread, taking turns. Prints medians and their ratio.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.megatron.engine import Engine
from activities.training.microbatches import micro_batches
from configs.grpo import LossConfig
from configs.training import TrainingConfig
from workers.demo.model import build_model
from workers.demo.tokenizer import build_tokenizer

ROWS = 24
MICRO_BATCH = 8
VOCABULARY = 128


def batch() -> TrainingBatch:
    """Rows of 100 to 250 tokens, of which every fourth was sampled."""
    draw = np.random.default_rng(0)
    rows: list[TrainingRow] = []
    for index in range(ROWS):
        tokens = int(draw.integers(100, 250))
        mask = (np.arange(tokens) % 4 == 3).astype(np.uint8)
        rows.append(
            TrainingRow(
                rollout_id=f"benchmark/step-0/group-0/rollout-{index}",
                segment=0,
                tokens=draw.integers(0, VOCABULARY, tokens).astype(np.int32),
                loss_mask=mask,
                log_probs=(mask * -4.85).astype(np.float32),
                advantage=float(draw.normal()),
            )
        )
    return TrainingBatch("benchmark", 0, tuple(rows))


def baseline(folder: Path, rows: TrainingBatch) -> Callable[[], None]:
    """A step with transformers: policy gradient on the same padded micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    micros = micro_batches(
        rows, rows_per_pass=MICRO_BATCH, data_parallel_size=1, data_parallel_rank=0, device=torch.device("cpu")
    )

    def step() -> None:
        for micro in micros:
            logits = model(input_ids=micro.tokens, use_cache=False).logits.float()
            nll = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), micro.labels.flatten(), reduction="none"
            ).view_as(micro.loss_mask)
            ((nll * micro.advantages * micro.loss_mask).sum() / rows.trained_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.set_num_threads(1)
    rows = batch()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "policy"
        words = build_tokenizer()
        build_model(words, 0).save_pretrained(folder)
        words.save_pretrained(folder)
        engine = Engine(
            TrainingConfig(lr=1e-4, threads=1, train_micro_batch_size=MICRO_BATCH),
            LossConfig(reference_policy_kl_penalty=0.0),
            seed=0,
        )
        engine.load_model(folder)
        candidates: dict[str, Callable[[], object]] = {
            "engine": lambda: engine.train(rows),
            "transformers": baseline(folder, rows),
        }
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(steps + 1):
            for name, step in candidates.items():
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:13s} {median:.3f} s a step, {rows.trained_tokens / median:,.0f} trained tokens/s")
    print(f"engine / transformers: {medians['engine'] / medians['transformers']:.2f}")


if __name__ == "__main__":
    main()
