"""The identity of a model folder: a digest that another model does not have, without reading all of a large one."""

import hashlib
from pathlib import Path

from workers.stack.recipes import check_model

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_WHOLE_BYTES = 64 * 2**20
_PIECES, _PIECE_BYTES = 64, 64 * 2**10


def model_digest(folder: Path) -> str:
    """Digest of the names and contents of a model's files: configuration, tokenizer, weights. Of a file above 64 MiB
    its size and 64 pieces count. StackError when it is no model folder."""
    check_model(folder)
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE_BYTES:
                digest.update(opened.read())
                continue
            for piece in range(_PIECES):
                opened.seek(piece * (size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()
