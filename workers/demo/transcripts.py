"""Transcripts of the safe that the demo policy is warm-started on: a player whose one decision is worth learning.

The first thought names a plan, every later thought repeats it. "split" tries the middle of the known range, "guess" any
digit. Both keep the range right and write every call correctly, so the only thing that reinforcement has to move is the
choice of that one word: about 0.33 of the reward with "guess", 0.92 with "split".
"""

import random
from dataclasses import dataclass

from workers.gym.safe.game import DIALS, DIGITS, Safe, prompt_of

SPLIT = "split"
GENERATION_PROMPT = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Turn:
    """One assistant turn. `arguments` and `output` are None for the closing turn, which calls no tool."""

    thought: str
    arguments: dict[str, int] | None
    output: str | None


@dataclass(frozen=True)
class Piece:
    """Consecutive text of a training row; `sampled` text is what the policy writes itself."""

    text: str
    sampled: bool


def episode(seed: int, split_probability: float, draw: random.Random) -> list[Turn]:
    """Play one safe to its end."""
    safe = Safe(seed)
    plan = SPLIT if draw.random() < split_probability else "guess"
    dial, low, high = 1, 1, DIGITS
    turns: list[Turn] = []
    while True:
        digit = (low + high) // 2 if plan == SPLIT else draw.randint(1, DIGITS)
        arguments = {"dial": dial, "digit": digit}
        output = safe.turn(arguments)
        turns.append(Turn(f"{plan} dial {dial} is {low} to {high}", arguments, output))
        if dial in safe.open_dials:
            if dial == DIALS:
                return [*turns, Turn("all open", None, None)]
            dial, low, high = dial + 1, 1, DIGITS
        elif "higher" in output:
            low = max(low, digit + 1)
        else:
            high = min(high, digit - 1)
        if safe.turns_left == 0:
            return [*turns, Turn("no turns left", None, None)]


def views(seed: int, turns: list[Turn], actions_per_chunk: int) -> list[list[Piece]]:
    """The conversation as an agent shows it that drops all but the last old thought after each chunk of turns.

    One view per chunk: earlier turns are context, the turns of the chunk are sampled.
    """
    head = f"<|im_start|>system\nTools:\nturn(dial/digit)<|im_end|>\n<|im_start|>user\n{prompt_of(seed)}<|im_end|>\n"
    result: list[list[Piece]] = []
    for first in range(0, len(turns), actions_per_chunk):
        pieces = [Piece(head, sampled=False)]
        for index, turn in enumerate(turns[: first + actions_per_chunk]):
            pieces.append(Piece(GENERATION_PROMPT, sampled=False))
            pieces.append(Piece(_written(turn, with_thought=index >= first - 1), sampled=index >= first))
            if turn.output is not None:
                pieces.append(Piece(_answered(turn.output), sampled=False))
        result.append(pieces)
    return result


def _written(turn: Turn, *, with_thought: bool) -> str:
    thought = f"<think>{turn.thought}</think>" if with_thought else ""
    if turn.arguments is None:
        return f"{thought}done<|im_end|>"
    dial, digit = turn.arguments["dial"], turn.arguments["digit"]
    call = f'{{"name": "turn", "arguments": {{"dial": {dial}, "digit": {digit}}}}}'
    return f"{thought}<tool_call>{call}</tool_call><|im_end|>"


def _answered(output: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>{output}</tool_response><|im_end|>\n"
