"""Exported weights are known by a digest over their files, and never loaded before it was checked.

The folder holds a model in Hugging Face format; the digest covers its safetensors files and their index.
"""

import hashlib
from pathlib import Path

from activities.files import file_digest
from activities.generation.errors import WeightsMissing
from workflows.messages import WeightsRef

INDEX_NAME = "model.safetensors.index.json"


def weights_label(version: int) -> str:
    """The name that vLLM gives to the weights of a policy version."""
    return f"policy-{version}"


def weights_digest(folder: Path) -> str:
    """sha256 over (name, sha256) of every weight file, in order of names; `WeightsMissing` when there is none."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == INDEX_NAME)
        lines = [f"{path.name} {file_digest(path)}\n" for path in files]
    except OSError as error:
        raise WeightsMissing(f"The weights folder {folder} cannot be read: {error.strerror}.") from error
    if not lines:
        raise WeightsMissing(f"The weights folder {folder} holds no .safetensors file.")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify_weights(weights: WeightsRef) -> None:
    """Check that the files of a record are there, unchanged."""
    found = weights_digest(Path(weights.path))
    if found != weights.digest:
        raise WeightsMissing(
            f"The weights of {weights_label(weights.version)} in {weights.path} have digest {found[:12]}, "
            f"their record says {weights.digest[:12]}. Delete the folder to have them exported again."
        )
