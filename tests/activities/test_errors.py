"""Every error is infra or data, by its type and its causes; what nobody recognises is data."""

import asyncio
import errno
import socket
from collections.abc import Iterator

import asyncpg
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from temporalio.exceptions import ApplicationError

from activities.errors import (
    MAX_CAUSE_CHARS,
    AgentFailed,
    AgentRefused,
    BoundaryError,
    ContentFailure,
    EnvironmentFailed,
    EnvironmentRefused,
    HandedOver,
    IntegrityError,
    ModelCallFailed,
    RolloutTimeout,
    bucket_of,
    bucket_of_status,
    describe,
    failure_error,
    failure_of,
    one_line,
    surfaced,
)
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import AttemptFenced, BlobUnreadable, BlobWriteError, LedgerUnavailable, RecoveryRefused, UnknownRun
from tests.causes import caused
from workflows.failures import HANDED_OVER
from workflows.messages import Failure


def transport_errors(base: type[httpx.TransportError] = httpx.TransportError) -> Iterator[type[httpx.TransportError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from transport_errors(kind)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nothing listens on, and that nobody else can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("status", [500, 503, 408, 429])
def test_status_that_may_pass(status: int) -> None:
    assert bucket_of_status(status) == "infra"


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_status_that_stays(status: int) -> None:
    assert bucket_of_status(status) == "data"


@given(st.integers(min_value=100, max_value=999))
def test_status_alone_decides(status: int) -> None:
    assert (bucket_of_status(status) == "infra") == (status >= 500 or status in {408, 429})


@pytest.mark.parametrize(
    "error",
    [RuntimeError("x"), ValueError(), KeyError("reward"), AssertionError(), FileNotFoundError(errno.ENOENT, "gone")],
    ids=repr,
)
def test_unknown_errors_are_data(error: Exception) -> None:
    assert bucket_of(error) == "data"


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionError(),
        ConnectionResetError(),
        BrokenPipeError(),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
    ],
    ids=repr,
)
def test_errors_of_machines_are_infra(error: Exception) -> None:
    assert bucket_of(error) == "infra"


@pytest.mark.parametrize("kind", list(transport_errors()), ids=str)
def test_transport_errors_of_http_are_infra(kind: type[httpx.TransportError]) -> None:
    assert bucket_of(kind("x")) == "infra"


def test_cause_decides_for_an_error_that_nobody_knows() -> None:
    assert bucket_of(caused(RuntimeError("x"), ConnectionError())) == "infra"
    assert bucket_of(caused(RuntimeError("x"), ValueError(), TimeoutError())) == "infra"


def test_context_without_a_cause_does_not_decide() -> None:
    error = RuntimeError("bug while handling a timeout")
    error.__context__ = TimeoutError()
    assert bucket_of(error) == "data"


def test_data_error_stays_data_whatever_caused_it() -> None:
    assert bucket_of(caused(AgentRefused("x"), TimeoutError())) == "data"
    assert bucket_of(caused(IntegrityError("x"), ConnectionError())) == "data"


def test_content_and_contradictions_are_data_and_a_failed_call_may_pass() -> None:
    assert bucket_of(ContentFailure("context_overflow")) == "data"
    assert bucket_of(IntegrityError("rewrite")) == "data"
    assert bucket_of(ModelCallFailed("HTTP 503")) == "infra"


def test_rollout_that_may_not_be_tried_again_is_lost_to_the_infrastructure() -> None:
    """Only an attempt that died without a word leads there: a failure that is reported is final itself."""
    assert bucket_of(RecoveryRefused("r", 0)) == "infra"


def test_typed_errors_know_their_bucket() -> None:
    assert bucket_of(AgentFailed("x")) == "infra"
    assert bucket_of(caused(RuntimeError("x"), RolloutTimeout("y"))) == "infra"
    assert bucket_of(caused(RuntimeError("x"), AgentRefused("y"))) == "data"


@given(st.integers(min_value=0, max_value=12))
def test_eight_links_of_the_chain_are_read(depth: int) -> None:
    chain: list[BaseException] = [*(ValueError(str(link)) for link in range(depth)), ConnectionError()]
    assert bucket_of(caused(RuntimeError("x"), *chain)) == ("infra" if depth + 1 < 8 else "data")


def test_cycle_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert bucket_of(first) == "data"


def test_ledger_and_blob_store_pass_but_their_refusals_do_not() -> None:
    assert bucket_of(LedgerUnavailable("db", "no answer")) == "infra"
    assert bucket_of(BlobWriteError("path", "disk full")) == "infra"
    assert bucket_of(BlobUnreadable("path", "stale handle")) == "infra"
    assert bucket_of(UnknownRun("r")) == "data"
    assert bucket_of(AttemptFenced("r", 0, 1, "abandoned")) == "data"


async def test_refused_connections_to_postgresql_are_infra(closed_port: int) -> None:
    dsn = f"postgresql://somebody:secret@127.0.0.1:{closed_port}/onbelay"
    with pytest.raises(ConnectionRefusedError) as raw:
        await asyncpg.connect(dsn)
    engine = create_async_engine(dsn.replace("postgresql", "postgresql+asyncpg"))
    with pytest.raises((ConnectionRefusedError, DBAPIError)) as through_sqlalchemy:
        await engine.connect()
    database = Database(StorageConfig(dsn=SecretStr(dsn)))
    with pytest.raises(LedgerUnavailable) as through_ledger:
        await database.ping()
    await engine.dispose()
    await database.close()
    assert [bucket_of(caught.value) for caught in (raw, through_sqlalchemy, through_ledger)] == ["infra"] * 3
    assert "secret" not in describe(through_ledger.value)


@pytest.mark.integration
async def test_connection_that_postgresql_ends_is_infra_and_a_bad_argument_is_data(database_dsn: str) -> None:
    connection = await asyncpg.connect(database_dsn)
    with pytest.raises(asyncpg.DataError) as bad_argument:
        await connection.fetchval("select $1::int", "seven")
    with pytest.raises(asyncpg.PostgresError) as ended:
        await connection.fetchval("select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(asyncpg.InterfaceError) as closed:
        await connection.fetchval("select 1")
    assert [bucket_of(caught.value) for caught in (bad_argument, ended, closed)] == ["data", "infra", "infra"]


async def test_blob_store_that_cannot_be_written_is_infra() -> None:
    with pytest.raises(BlobWriteError) as unwritable:
        await BlobStore("/dev/full").put(b"x")
    assert bucket_of(unwritable.value) == "infra"


def test_failure_names_everything_and_its_own_boundary() -> None:
    failure = failure_of(
        AgentFailed("HTTP\n500"), boundary="ledger", run_id="r", group_id="r/g", rollout_id="r/g/1", attempt=2
    )
    assert failure == Failure(
        run_id="r",
        group_id="r/g",
        rollout_id="r/g/1",
        attempt=2,
        boundary="agent",
        bucket="infra",
        failure_class="AgentFailed",
        cause="agent_run_error: HTTP 500",
    )
    error = failure_error(failure)
    assert error.message == "AgentFailed at the agent boundary: r/g/1 attempt 2: agent_run_error: HTTP 500"
    assert (error.type, error.non_retryable, error.details) == ("AgentFailed", False, (failure,))


def test_final_failure_is_not_retried_whatever_its_bucket() -> None:
    failure = failure_of(AgentFailed("HTTP 500"), boundary="agent", run_id="r")
    assert not failure_error(failure).non_retryable
    assert failure_error(failure.model_copy(update={"final": True})).non_retryable


def test_hand_over_is_of_the_infrastructure_and_not_retried_by_temporal() -> None:
    failure = failure_of(HandedOver("the worker stops"), boundary="agent", run_id="r")
    assert (failure.failure_class, failure.bucket, failure.final) == (HANDED_OVER, "infra", False)
    assert failure_error(failure).non_retryable


def test_error_without_a_boundary_takes_that_of_the_activity() -> None:
    assert failure_of(KeyError("x"), boundary="trainer", run_id="r").boundary == "trainer"


def test_error_without_text_is_described_by_its_class() -> None:
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(ValueError(" \n ")) == "ValueError"


@given(st.text(st.characters(exclude_categories=()), max_size=3 * MAX_CAUSE_CHARS))
def test_any_text_becomes_a_bounded_line_that_every_store_takes(text: str) -> None:
    line = one_line(text)
    line.encode()
    assert len(line) <= MAX_CAUSE_CHARS
    assert "\0" not in line
    assert line == " ".join(line.split())


def test_surfaced_turns_an_error_into_the_activity_error() -> None:
    with pytest.raises(ApplicationError) as raised, surfaced(boundary="trainer", run_id="r", group_id="r/g"):
        raise KeyError("loss")
    (failure,) = raised.value.details
    assert (failure.boundary, failure.bucket, failure.group_id) == ("trainer", "data", "r/g")
    assert raised.value.non_retryable
    assert isinstance(raised.value.__cause__, KeyError)


def test_surfaced_lets_an_activity_error_through_as_it_is() -> None:
    error = ApplicationError("already said")
    with pytest.raises(ApplicationError) as raised, surfaced(boundary="trainer", run_id="r"):
        raise error
    assert raised.value is error


def test_cancellation_passes_through_surfaced() -> None:
    with pytest.raises(asyncio.CancelledError), surfaced(boundary="ledger", run_id="r"):
        raise asyncio.CancelledError


def test_every_typed_error_has_a_boundary_and_a_bucket() -> None:
    for kind in (EnvironmentFailed, EnvironmentRefused, *BoundaryError.__subclasses__()):
        if kind.__name__.startswith("_"):  # a base of others
            continue
        assert kind.boundary in {"agent", "environment", "model", "ledger", "trainer", "generation"}
        assert kind.bucket in {"infra", "data"}
