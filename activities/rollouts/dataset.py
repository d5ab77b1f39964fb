"""The dataset: a JSONL file of NeMo-Gym rows that is never half valid.

`scan` reads the whole file once, checks every row and names the line of the first bad one; `Dataset.row` reads one row.
A run records the digest of its dataset, so a file that changes under a run is refused.
"""

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_ROW_BYTES = 64 * 2**20
MAX_PROMPT_ID_CHARS = 200


class DatasetError(Exception):
    """The file is missing or a row cannot be used; the text names file, line and remedy."""


@dataclass(frozen=True)
class Dataset:
    """A scanned file: the digest of its bytes; offsets and checksums [rows] of its rows."""

    path: Path
    digest: str
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    prompt_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, parsed; DatasetError when the file is not what was scanned."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offsets[index])
                line = file.readline(MAX_ROW_BYTES)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if zlib.crc32(line) != self.checksums[index]:
            raise DatasetError(f"{self.path}: row {index} changed while the file was in use; put the old file back")
        return json.loads(line)


def scan(path: Path) -> Dataset:
    """Check every row of `path`.

    Raises:
        DatasetError: missing file, no rows, malformed JSON, or a row without `responses_create_params` or `agent_ref`.
    """
    digest = hashlib.sha256()
    offsets: list[int] = []
    checksums: list[int] = []
    prompt_ids: dict[str, int] = {}  # and their lines
    offset = number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                digest.update(line)
                if line.strip():
                    row = _checked(path, number, line)
                    prompt_id = str(row.get("prompt_id") or f"row-{len(offsets):06d}")
                    if len(prompt_id) > MAX_PROMPT_ID_CHARS or not prompt_id.isprintable():
                        raise DatasetError(
                            f"{path}, line {number}: prompt_id must be printable text of at most "
                            f"{MAX_PROMPT_ID_CHARS} characters"
                        )
                    if prompt_id in prompt_ids:
                        raise DatasetError(
                            f"{path}, line {number}: prompt_id {prompt_id!r} stands in line {prompt_ids[prompt_id]} "
                            "already; prompt ids must be unique"
                        )
                    offsets.append(offset)
                    checksums.append(zlib.crc32(line))
                    prompt_ids[prompt_id] = number
                offset += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not offsets:
        raise DatasetError(f"{path}: the dataset has no rows; it needs one JSON object a line")
    return Dataset(path, digest.hexdigest(), tuple(offsets), tuple(checksums), tuple(prompt_ids))


def _unreadable(path: Path, error: OSError) -> DatasetError:
    return DatasetError(f"{path}: cannot read the dataset ({error.strerror}); check the path")


def _checked(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    if len(line) > MAX_ROW_BYTES:
        raise DatasetError(f"{where}: the row has more than {MAX_ROW_BYTES} bytes; shorten it")
    try:
        row = json.loads(line, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: malformed JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object, found {type(row).__name__}")
    params = row.get("responses_create_params")
    if not isinstance(params, dict) or "input" not in params:
        raise DatasetError(f"{where}: `responses_create_params` with an `input` is missing; NeMo-Gym needs it")
    agent = row.get("agent_ref")
    if not isinstance(agent, dict) or not isinstance(agent.get("name"), str) or not agent["name"]:
        raise DatasetError(f"{where}: `agent_ref` with a `name` is missing; it says which agent server runs the row")
    return row


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
