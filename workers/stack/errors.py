"""What can go wrong with the embedded stack. Every message names the file, port or key, and what to do."""

from pathlib import Path


class StackError(RuntimeError):
    """The stack cannot do what was asked (exit code 1)."""


class PortTaken(StackError):
    """A port that the recipe asks for is in use."""

    def __init__(self, port: int, key: str, holder: str) -> None:
        super().__init__(
            f"Port {port} on 127.0.0.1 is in use by {holder}. Stop that process, or change {key} (0 picks a free port)."
        )
        self.port = port
        self.key = key


class BinariesMissing(StackError):
    """A program that the embedded stack runs is not installed."""


class UnsafeFolder(StackError):
    """A folder in a shared place does not belong to us."""


class ServiceFailed(StackError):
    """A service does not start; the message ends with the end of its log."""

    def __init__(self, name: str, reason: str, log: Path, tail: str) -> None:
        quoted = "\n".join(f"  | {line}" for line in tail.splitlines())
        super().__init__(
            f"{name} does not start: {reason}. Its log is {log}" + (f"; it ends with\n{quoted}" if quoted else ".")
        )


class OtherStackIsUp(StackError):
    """The stack is up with another recipe."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(
            f"A stack with a different recipe is up in {state_dir}. Run `onbelay down` first, "
            "or set ONBELAY_STATE_DIR to another folder for a second stack (with other ports)."
        )
