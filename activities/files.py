"""Files as activities know them: by the digest of their content."""

import hashlib
from pathlib import Path


def file_digest(path: Path) -> str:
    """sha256 of a file, in hex; the file is never in memory as a whole."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
