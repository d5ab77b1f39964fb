"""A dataset is usable as a whole, or refused with the line that is wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from activities.rollouts import dataset
from activities.rollouts.dataset import DatasetError, scan


def row(**fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "climb"}, "agent_ref": {"name": "safe_agent"}, **fields}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in lines)
    )
    return path


def test_each_row_equals_its_line(tmp_path: Path) -> None:
    rows = [row(prompt_id=f"safe-{number}", text="ü€😀" * number) for number in range(5)]
    path = write(tmp_path, *rows)
    scanned = scan(path)
    assert len(scanned) == 5
    assert [scanned.row(index) for index in (3, 0, 4, 1, 2)] == [rows[index] for index in (3, 0, 4, 1, 2)]
    assert scanned.prompt_ids == tuple(f"safe-{number}" for number in range(5))
    assert scanned.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    scanned = scan(write(tmp_path, "", row(number=0), "   ", "", row(number=1), ""))
    assert [scanned.row(index)["number"] for index in range(2)] == [0, 1]
    with pytest.raises(DatasetError, match="line 4: malformed JSON"):
        scan(write(tmp_path, "", row(), "", "{"))


def test_last_row_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(number=0)) + "\r\n" + json.dumps(row(number=1)))
    assert scan(path).row(1)["number"] == 1


def test_rows_without_a_prompt_id_are_named_by_their_place(tmp_path: Path) -> None:
    assert scan(write(tmp_path, row(), row(prompt_id=7), row())).prompt_ids == ("row-000000", "7", "row-000002")


REFUSED = {
    "malformed": ('{"responses_create_params": ', "malformed JSON"),
    "not a number of JSON": (
        '{"responses_create_params": {"input": NaN}, "agent_ref": {"name": "a"}}',
        "NaN is not JSON",
    ),
    "nested without end": ("[" * 100_000, "malformed JSON"),
    "list": ("[1]", "expected a JSON object, found list"),
    "no params": ('{"agent_ref": {"name": "a"}}', "responses_create_params"),
    "no input": ('{"responses_create_params": {}, "agent_ref": {"name": "a"}}', "responses_create_params"),
    "no agent": ('{"responses_create_params": {"input": "x"}}', "agent_ref"),
    "nameless agent": ('{"responses_create_params": {"input": "x"}, "agent_ref": {"name": ""}}', "agent_ref"),
    "agent with a number": ('{"responses_create_params": {"input": "x"}, "agent_ref": {"name": 5}}', "agent_ref"),
    "prompt id with NUL": (json.dumps(row(prompt_id="a\0")), "prompt_id must be printable"),
    "long prompt id": (json.dumps(row(prompt_id="a" * 201)), "prompt_id must be printable"),
}


@pytest.mark.parametrize(("line", "message"), REFUSED.values(), ids=list(REFUSED))
def test_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, row(), row(), line, row())
    with pytest.raises(DatasetError) as refused:
        scan(path)
    assert f"{path}, line 3" in str(refused.value)
    assert message in str(refused.value)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(DatasetError, match="line 2: malformed JSON"):
        scan(path)


def test_prompt_ids_are_unique_and_both_lines_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"line 4: prompt_id 'a' stands in line 2 already"):
        scan(write(tmp_path, "", row(prompt_id="a"), row(prompt_id="b"), row(prompt_id="a")))


@pytest.mark.parametrize("lines", [(), ("", "  ")], ids=["empty", "blank"])
def test_dataset_without_rows_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(DatasetError, match="has no rows"):
        scan(write(tmp_path, *lines))


def test_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"absent\.jsonl: cannot read the dataset \(No such file"):
        scan(tmp_path / "absent.jsonl")


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="Is a directory"):
        scan(tmp_path)


def test_row_of_the_limit_is_read_and_a_longer_one_is_refused_without_reading_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = json.dumps(row())
    monkeypatch.setattr(dataset, "MAX_ROW_BYTES", len(fits) + 1)
    assert scan(write(tmp_path, fits)).row(0) == row()
    with pytest.raises(DatasetError, match=rf"line 2: the row has more than {len(fits) + 1} bytes"):
        scan(write(tmp_path, fits, fits + " " * 100, "never read"))


def test_file_that_changes_after_the_scan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, row(number=0), row(number=1))
    scanned = scan(path)
    write(tmp_path, row(number=0), row(number=2))
    assert scanned.row(0)["number"] == 0
    with pytest.raises(DatasetError, match="row 1 changed while the file was in use"):
        scanned.row(1)
    path.unlink()
    with pytest.raises(DatasetError, match="cannot read the dataset"):
        scanned.row(0)
