"""The demo's policy version 0: made once, then found again by the digest of everything that it was made from.

The folder appears complete or not at all. It is a Hugging Face model folder that vLLM and the trainer read.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from workers.gym.safe import game

_MARK = "onbelay_policy.json"
_MODEL_SEED = 0
_HERE = Path(__file__).parent
_SOURCES = (
    *(_HERE / f"{name}.py" for name in ("vocabulary", "tokenizer", "transcripts", "dataset", "model", "warm_start")),
    Path(game.__file__),
    _HERE / "chat_template.jinja",
)


class FolderTaken(Exception):
    """The folder holds something that this module did not make, so it is left alone."""


def make_policy(folder: Path, progress: Callable[[str], None]) -> None:
    """Put the policy into `folder` unless it is there already. `progress` gets lines of text."""
    digest = recipe_digest()
    if _digest_in(folder) == digest:
        progress(f"policy is up to date in {folder}")
        return
    if folder.exists() and not (folder / _MARK).is_file() and any(folder.iterdir()):
        raise FolderTaken(f"{folder} is not empty and holds no demo policy: give another folder, or remove it.")
    # Here, because the imports take seconds and a policy that is there needs none of them.
    from transformers.utils import logging

    from workers.demo import model, tokenizer, warm_start

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        words = tokenizer.build_tokenizer()
        network = model.build_model(words, _MODEL_SEED)
        progress(f"making a policy of {sum(p.numel() for p in network.parameters()):,} parameters (one to two minutes)")
        warm_start.warm_start(network, words, progress)
        logging.disable_progress_bar()  # progress() tells enough
        network.save_pretrained(made)
        words.save_pretrained(made)
        (made / _MARK).write_text(json.dumps({"digest": digest}) + "\n")
        if folder.exists():
            folder.rename(Path(temporary) / "older")
        made.rename(folder)
    progress(f"policy is ready in {folder}")


def recipe_digest() -> str:
    """sha256 over the sources that decide what the policy is."""
    digest = hashlib.sha256()
    for path in _SOURCES:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _digest_in(folder: Path) -> str | None:
    mark = folder / _MARK
    return json.loads(mark.read_text())["digest"] if mark.is_file() else None
