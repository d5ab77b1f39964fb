"""Supervised warm start: a fixed number of steps over generated transcripts, so that it is the same each time.

It ends with a policy that reasons and calls the tool in the right format nearly always, and mostly plays badly.
"""

import random
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from workers.demo.dataset import TRAINING_SEEDS
from workers.demo.transcripts import SPLIT, episode, views

STEPS = 320
ROWS_PER_STEP = 12
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
DECAY_FROM = 0.5
SPLIT_PROBABILITY = 0.5
# Half of the transcripts show how "split" is played, but its choice counts in the loss for only this share of them: the
# policy plays both plans well and chooses "split" with probability 0.5 * 0.25 / (0.5 * 0.25 + 0.5) = 0.2.
SPLIT_CHOICE_SHARE = 0.25
ACTIONS_PER_CHUNK = 4
SEED = 1
REPORT_EVERY_STEPS = 20


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    progress: Callable[[str], None],
    steps: int = STEPS,
) -> None:
    """Train in place on one thread; calls `progress` with a line of text from time to time."""
    rows = _Rows(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads wait for each other at this size; one is also reproducible
    started = time.monotonic()
    try:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _schedule(step, steps)
            loss = _loss(model, *rows.draw(ROWS_PER_STEP))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % REPORT_EVERY_STEPS == 0 or step + 1 == steps:
                left_s = (time.monotonic() - started) / (step + 1) * (steps - step - 1)
                progress(f"warm start {100 * (step + 1) // steps:3d} %  loss {loss.item():.3f}  {left_s:.0f} s left")
    finally:
        torch.set_num_threads(threads)


class _Rows:
    """Endless padded training rows, deterministic from the first on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._draw = random.Random(SEED)
        self._encoded: dict[str, list[int]] = {}
        (self._split,) = self._encode(SPLIT)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and loss mask, both [count, tokens]."""
        rows = [self._row() for _ in range(count)]
        tokens = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(count, tokens, dtype=torch.long)
        mask = torch.zeros(count, tokens)
        for index, (row_ids, row_mask) in enumerate(rows):
            ids[index, : len(row_ids)] = torch.tensor(row_ids)
            mask[index, : len(row_mask)] = torch.tensor(row_mask)
        return ids, mask

    def _row(self) -> tuple[list[int], list[float]]:
        """Half of the rows are whole episodes, half are one view of a compacted one."""
        seed = self._draw.choice(TRAINING_SEEDS)
        turns = episode(seed, SPLIT_PROBABILITY, self._draw)
        whole = self._draw.random() < 0.5
        shown = views(seed, turns, len(turns) if whole else ACTIONS_PER_CHUNK)
        view = self._draw.randrange(len(shown))
        pieces = shown[view]
        ids: list[int] = []
        mask: list[float] = []
        for piece in pieces:
            piece_ids = self._encode(piece.text)
            ids += piece_ids
            mask += [float(piece.sampled)] * len(piece_ids)
        chooses_split = view == 0 and turns[0].thought.startswith(SPLIT)
        if chooses_split and self._draw.random() >= SPLIT_CHOICE_SHARE:
            mask[ids.index(self._split)] = 0.0
        return ids, mask

    def _encode(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._encoded[text]


def _loss(model: Qwen3ForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = mask[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, constant, linear decay."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    done = step / steps
    return warm * (1.0 if done < DECAY_FROM else max(0.02, (1 - done) / (1 - DECAY_FROM)))
