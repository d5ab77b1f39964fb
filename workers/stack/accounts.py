"""PostgreSQL refuses to run as root: which account it gets, and a folder that this account can reach.

Run by root, the server runs as `postgres`, or `nobody`, and its files lie under /var/tmp: the folders above a state
folder (a home folder, mode 0700) are often closed to that account, and opening them is not ours to do. Any other
user keeps everything in the state folder.
"""

import hashlib
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from workers.stack.errors import StackError, UnsafeFolder

SHARED = Path("/var/tmp")  # survives a reboot, unlike /tmp


@dataclass(frozen=True)
class Account:
    """The account of the server: `name` is None when it is the current one."""

    name: str | None
    uid: int
    gid: int


def server_account() -> Account:
    """The current account, or an unprivileged one when the current one is root."""
    if os.geteuid() != 0:
        return Account(None, os.geteuid(), os.getegid())
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise StackError(
        "PostgreSQL does not run as root, and neither a `postgres` nor a `nobody` account exists: create one, "
        "run Onbelay as another user, or give an existing server in storage.dsn."
    )


def server_folder(state_dir: Path, account: Account) -> Path:
    """A folder for the server's files that the account can reach, the same for the same state folder."""
    if account.name is None:
        folder = state_dir.resolve() / "postgres"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
    top = own_folder(SHARED / f"onbelay-{os.geteuid()}")
    return own_folder(top / hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12])


def own_folder(path: Path) -> Path:
    """Create a folder others may pass through but not list; one that belongs to somebody else is refused."""
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"{path} exists and does not belong to this user: remove it, or give a server in storage.dsn."
        )
    path.chmod(0o711)
    return path
