"""What the files of offline W&B sessions hold already, so that no step is written to them twice."""

from pathlib import Path
from typing import Any


def next_step(folder: Path, run_id: str) -> int:
    """The step after the newest one that sessions of a run wrote below `folder`; 0 without any."""
    return max((step for file in run_files(folder, run_id) for step in steps_in(file)), default=-1) + 1


def run_files(folder: Path, run_id: str) -> list[Path]:
    """The files of the sessions of a run, oldest first."""
    return sorted(folder.glob(f"wandb/*/run-{run_id}.wandb"))


def steps_in(file: Path) -> dict[int, dict[str, str]]:
    """The steps of a file and their values as JSON texts, by name. A file that a killed session left is read up to
    where it breaks off."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found: dict[int, dict[str, str]] = {}
    store, internal = DataStore(), _untyped(wandb_internal_pb2)
    try:
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = internal.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {(item.key or ".".join(item.nested_key)): item.value_json for item in record.history.item}
                found[int(values["_step"])] = values
    except (AssertionError, EOFError, OSError, ValueError):  # as the reader says that a record is not whole
        return found
    finally:
        store.close()
    return found


def _untyped(module: Any) -> Any:
    """A generated module, whose classes a type checker cannot see."""
    return module
