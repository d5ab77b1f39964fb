"""The rules of the safe: three hidden digits, nine turns, a hint after each; the reward is the share of open dials.

Deterministic given the seed. Every tool call costs a turn, a malformed one too. Shared by the environment server and by
the transcripts that the demo policy starts from, so the policy never sees a text here that it was not shown before.
Only the standard library, because it runs in two environments.
"""

import random
from typing import Any

DIALS = 3
DIGITS = 9
TURNS = 9
CODES = DIGITS**DIALS
OWNERS = (
    "Ada",
    "Ben",
    "Cleo",
    "Dora",
    "Emil",
    "Fay",
    "Gus",
    "Hugo",
    "Ines",
    "Jon",
    "Kim",
    "Lou",
    "Mia",
    "Ned",
    "Olga",
    "Pia",
)

TURN_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "turn",
    "description": "Turn one dial to a digit.",
    "strict": False,  # NeMo-Gym requires the key; true would let vLLM mask tokens by a grammar
    "parameters": {
        "type": "object",
        "properties": {"dial": {"type": "integer"}, "digit": {"type": "integer"}},
        "required": ["dial", "digit"],
        "additionalProperties": False,
    },
}

BAD_CALL = '{"error": "bad call"}'
STOPPED = '{"hint": "stop", "left": 0}'


def code_of(seed: int) -> tuple[int, ...]:
    """The hidden digits, each 1..9. Seeds 0..728 give every code once; equal modulo 729 means equal codes."""
    index = (seed * 325 + 211) % CODES  # 325 and 729 have no common factor
    return tuple(index // DIGITS**dial % DIGITS + 1 for dial in range(DIALS))


def prompt_of(seed: int) -> str:
    """The user's text. Number and owner are drawn apart from the code and tell nothing about it."""
    draw = random.Random(f"safe prompt {seed}")
    return f"Open safe {draw.randint(10, 99)} of {draw.choice(OWNERS)}. {DIALS} parts and {TURNS} turns."


class Safe:
    """One safe that is being opened."""

    def __init__(self, seed: int) -> None:
        self.code = code_of(seed)
        self.turns_left = TURNS
        self.open_dials: set[int] = set()

    @property
    def reward(self) -> float:
        """Share of the dials that are open, 0..1."""
        return len(self.open_dials) / DIALS

    def turn(self, arguments: object) -> str:
        """Play one tool call and return its output; `arguments` may be anything the policy wrote."""
        if self.turns_left == 0 or len(self.open_dials) == DIALS:
            return STOPPED
        self.turns_left -= 1
        dial, digit = (arguments.get("dial"), arguments.get("digit")) if isinstance(arguments, dict) else (None, None)
        if type(dial) is not int or type(digit) is not int or not 1 <= dial <= DIALS or not 1 <= digit <= DIGITS:
            return BAD_CALL
        hidden = self.code[dial - 1]
        if digit == hidden:
            self.open_dials.add(dial)
        hint = "open" if digit == hidden else ("higher" if digit < hidden else "lower")
        return f'{{"hint": "{hint}"}}' if self.turns_left else f'{{"hint": "{hint}", "left": 0}}'
