"""The demo's prompts as NeMo-Gym rows. Codes of the validation rows occur in no training row and in no transcript."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.gym.safe.game import CODES, TURN_TOOL, prompt_of

AGENT_NAME = "safe_agent"
TRAINING_SEEDS = range(600)
VALIDATION_SEEDS = range(600, CODES)


def row(seed: int) -> dict[str, Any]:
    """One prompt: what the policy is shown, which agent plays it, and what the environment hides."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": prompt_of(seed)}], "tools": [TURN_TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT_NAME},
        "safe_seed": seed,
    }


def write_datasets(folder: Path) -> tuple[Path, Path]:
    """Write train.jsonl and validation.jsonl and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder / "train.jsonl", TRAINING_SEEDS), _write(folder / "validation.jsonl", VALIDATION_SEEDS)


def _write(path: Path, seeds: Sequence[int]) -> Path:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row(seed)) + "\n" for seed in seeds))
    temporary.replace(path)
    return path
