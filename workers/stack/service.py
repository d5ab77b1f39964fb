"""What the supervisor runs: services (processes that stay up) and actions (done once, between services).

Both are data. A service's command is made anew before every start, so that a restart can choose another port.
"""

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """One start of a service. `user`: run as this account (only root can)."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str | None = None


@dataclass(frozen=True)
class Service:
    """A supervised process.

    `launch` prepares and names the command; `ready` returns when the service can be used and raises while it cannot
    (it is asked again until `ready_timeout_s`); `after` are the names of what must be ready first.
    """

    name: str
    launch: Callable[[], Awaitable[Launch]]
    ready: Callable[[], Awaitable[None]]
    ready_timeout_s: float
    after: tuple[str, ...] = ()
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    address: str | None = None


@dataclass(frozen=True)
class Action:
    """Something that is done once when the stack starts."""

    name: str
    run: Callable[[], Awaitable[None]]
    timeout_s: float
    after: tuple[str, ...] = ()
