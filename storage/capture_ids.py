"""The identity of an attempt towards NeMo-Gym: `run.step-0.group-1.rollout-2`, with `-a3` for attempt 3.

NeMo-Gym allows letters, digits, dot, underscore and dash in a rollout id, and appends `-a<attempt>` itself. Run ids
have no dot and rollout ids end with `/rollout-<index>`, so the text can be read back exactly.
"""

import re

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*/rollout-(0|[1-9][0-9]*)")
_CAPTURE_ID = re.compile(r"(?P<rollout>[A-Za-z0-9_.-]+\.rollout-[0-9]+)(-a(?P<attempt>[1-9][0-9]*))?")


def capture_id(rollout_id: str, attempt: int = 0) -> str:
    """The id of an attempt's model calls. ValueError for an id that could not be read back."""
    if _ROLLOUT_ID.fullmatch(rollout_id) is None or attempt < 0:
        raise ValueError(f"attempt {attempt} of rollout {rollout_id!r} has no capture id: not .../rollout-<index>")
    text = rollout_id.replace("/", ".")
    return f"{text}-a{attempt}" if attempt else text


def parse_capture_id(text: str) -> tuple[str, int]:
    """The rollout and the attempt of a capture id, or ValueError."""
    match = _CAPTURE_ID.fullmatch(text)
    rollout_id = match["rollout"].replace(".", "/") if match else ""
    if match is None or _ROLLOUT_ID.fullmatch(rollout_id) is None:
        raise ValueError(f"{text!r} is no capture id: it should read <run>.<step>.<group>.rollout-<index>[-a<attempt>]")
    return rollout_id, int(match["attempt"] or 0)
