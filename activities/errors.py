"""The error model of activities.

1. Vocabulary: an error is typed by the boundary that was crossed: agent, environment, model, ledger, trainer or
   generation.
2. Classification: every error is `infra` (a retry can help) or `data` (the same input fails again); what nobody
   recognises is `data`, so that a bug is loud and not retried into silence. Cancellation is neither.
3. Surfacing: an activity ends with one ApplicationError whose detail is a Failure that names run, group, rollout,
   attempt, boundary and cause. Data failures are non-retryable there, and so is a final one, which no budget retries.
4. Capture: `surfaced` turns whatever escapes a block into that error.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from temporalio.exceptions import ApplicationError

from workflows.failures import HANDED_OVER
from workflows.messages import Boundary, Bucket, Failure

MAX_CAUSE_CHARS = 2000
_MAX_CHAIN = 8

# By the names in their MRO: classes of drivers and HTTP clients, which this layer must not import, and of storage.
_INFRA_CLASS_NAMES = frozenset(
    {
        "TransportError",  # httpx: timeouts, refused, reset and broken connections
        "LedgerUnavailable",
        "RecoveryRefused",  # an attempt of a rollout that may have only one died without a word
        "BlobWriteError",
        "BlobUnreadable",
        "OperationalError",  # SQLAlchemy
        "InterfaceError",
        "PostgresConnectionError",  # asyncpg
        "CannotConnectNowError",
        "AdminShutdownError",
        "CrashShutdownError",
    }
)

# Disk full, broken or stale file systems, too many open files, no route: OSErrors that pass, unlike a missing file.
_INFRA_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    }
)


class BoundaryError(Exception):
    """Base of the typed errors. `kind`: NeMo-Gym's name for it (`nemo_gym.failure_kinds`), where one fits."""

    boundary: ClassVar[Boundary]
    bucket: ClassVar[Bucket]
    kind: str | None = None

    @property
    def failure_class(self) -> str:
        """Its name in the ledger, in search attributes and for Temporal."""
        return type(self).__name__


class AgentUnavailable(BoundaryError):
    """The server of `/run`, an agent's or an environment's, could not be reached, or the connection broke."""

    boundary = "agent"
    bucket = "infra"

    def __init__(self, message: str, *, connected: bool = True) -> None:
        super().__init__(message)
        self.kind = "transport_peer_drop" if connected else "transport_unreachable"


class RolloutTimeout(BoundaryError):
    """`/run` did not answer within `rollouts.rollout_timeout_s`."""

    boundary = "agent"
    bucket = "infra"
    kind = "agent_timeout"


class AgentFailed(BoundaryError):
    """`/run` answered 5xx, 408 or 429. Agent bugs and dead servers behind it look the same."""

    boundary = "agent"
    bucket = "infra"

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status
        # NeMo-Gym's own servers answer 500; the others say that something in front of them did, and nothing ran.
        self.kind = "agent_request_failed" if status in (429, 502, 503, 504) else "agent_run_error"


class AgentRefused(BoundaryError):
    """`/run` answered another 4xx: the row is not what this server takes."""

    boundary = "agent"
    bucket = "data"


class _Told(BoundaryError):
    """`/run` answered 200 and told of a failure. A `kind` that it named is the name of the failure."""

    boundary = "environment"

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def failure_class(self) -> str:
        return self.kind or type(self).__name__


class EnvironmentFailed(_Told):
    """An environment, or something that it needs, failed; another attempt may find it well."""

    bucket = "infra"


class EnvironmentRefused(_Told):
    """The environment has no use for the episode, and would have none for the same one again."""

    bucket = "data"


class IntegrityError(BoundaryError):
    """What the agent answered, what its model calls hold and what is recorded contradict each other.

    Always raised, never masked: a rollout whose tokens nobody can vouch for must not keep a place in its group.
    """

    boundary = "model"
    bucket = "data"


class ContentFailure(BoundaryError):
    """The rollout's own content ended it: its replay would end the same way, so only a fresh sample may follow."""

    boundary = "model"
    bucket = "data"


class ModelCallFailed(BoundaryError):
    """The infrastructure failed the last model call, and the agent answered as if its episode were over."""

    boundary = "model"
    bucket = "infra"


class PolicyMismatch(BoundaryError):
    """A vLLM endpoint serves another policy version than those that may sample for the group, or does not say which."""

    boundary = "generation"
    bucket = "infra"


class HandedOver(BoundaryError):
    """The worker stops and gave the rollout back: nobody's failure; another attempt goes on from what is recorded."""

    boundary = "agent"
    bucket = "infra"
    kind = "shutdown"


class DeadlinePassed(TimeoutError):
    """An activity was still at work shortly before Temporal would have given it up."""


class RecipeRefused(BoundaryError):
    """A changed recipe would not be valid; the text names the key."""

    boundary = "ledger"
    bucket = "data"


def bucket_of_status(status: int) -> Bucket:
    """Bucket of an HTTP status, decided by the status alone."""
    return "infra" if status >= 500 or status in (408, 429) else "data"


def bucket_of(error: BaseException) -> Bucket:
    """Classify an error by its type, then by its chain of causes (at most eight links)."""
    if isinstance(error, BoundaryError):
        return error.bucket
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):  # a bound also on cycles
        if link is None:
            break
        if _is_infra(link):
            return "infra"
        link = link.__cause__
    return "data"


def _is_infra(error: BaseException) -> bool:
    if isinstance(error, BoundaryError):
        return error.bucket == "infra"
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _INFRA_ERRNOS:
        return True
    return any(cls.__name__ in _INFRA_CLASS_NAMES for cls in type(error).__mro__)


def describe(error: BaseException) -> str:
    """One bounded line: the message, or the class where there is none."""
    return one_line(str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """Foreign text as a bounded line that every store takes: PostgreSQL refuses NUL, UTF-8 lone surrogates."""
    line = " ".join(text.split()).replace("\0", "�").encode(errors="replace").decode()
    return line if len(line) <= MAX_CAUSE_CHARS else line[: MAX_CAUSE_CHARS - 1] + "…"


def failure_of(
    error: BaseException,
    *,
    boundary: Boundary,
    run_id: str,
    group_id: str | None = None,
    rollout_id: str | None = None,
    attempt: int | None = None,
) -> Failure:
    """The Failure that describes `error`; `boundary` is used where the error does not know its own."""
    return Failure(
        run_id=run_id,
        group_id=group_id,
        rollout_id=rollout_id,
        attempt=attempt,
        boundary=error.boundary if isinstance(error, BoundaryError) else boundary,
        bucket=bucket_of(error),
        failure_class=error.failure_class if isinstance(error, BoundaryError) else type(error).__name__,
        cause=_cause(error),
    )


def _cause(error: BaseException) -> str:
    """What is said of an error, after NeMo-Gym's name for it unless that is its class already."""
    kind = error.kind if isinstance(error, BoundaryError) and error.kind != error.failure_class else None
    return describe(error) if kind is None else one_line(f"{kind}: {describe(error)}")


def failure_error(failure: Failure) -> ApplicationError:
    """The activity error that carries `failure`; a data failure, a final one or a hand-over is not retried here."""
    where = failure.rollout_id or failure.group_id or failure.run_id
    attempt = "" if failure.attempt is None else f" attempt {failure.attempt}"
    return ApplicationError(
        f"{failure.failure_class} at the {failure.boundary} boundary: {where}{attempt}: {failure.cause}",
        failure,
        type=failure.failure_class,
        non_retryable=failure.final or failure.bucket == "data" or failure.failure_class == HANDED_OVER,
    )


@contextmanager
def surfaced(*, boundary: Boundary, run_id: str, group_id: str | None = None) -> Iterator[None]:
    """Turn an error that escapes the block into the activity error that names run, group and cause."""
    try:
        yield
    except ApplicationError:
        raise
    except Exception as error:
        raise failure_error(failure_of(error, boundary=boundary, run_id=run_id, group_id=group_id)) from error
