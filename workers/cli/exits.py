"""How commands end: 0, 1 for a failure, 2 for wrong usage or configuration; a paragraph on standard error says why."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import typer
from sqlalchemy.exc import DBAPIError
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from activities.rollouts.dataset import DatasetError
from configs.errors import ConfigError
from storage.errors import StorageError
from workers.stack.errors import StackError
from workers.temporal_client import TemporalUnavailable

FAILURE = 1
USAGE = 2

_Result = TypeVar("_Result")


class CommandError(Exception):
    """A command cannot go on; the text says why and what to do."""

    def __init__(self, message: str, code: int = FAILURE) -> None:
        super().__init__(message)
        self.code = code


def run(command: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a command's coroutine; known errors become one paragraph and an exit code."""
    try:
        return asyncio.run(command)
    except CommandError as error:
        fail(str(error), error.code)
    except (ConfigError, DatasetError) as error:
        fail(str(error), USAGE)
    except (StorageError, StackError, TemporalUnavailable) as error:
        fail(str(error))
    except WorkflowAlreadyStartedError as error:
        fail(f"Temporal runs a workflow {error.workflow_id} already: another ledger's, or one that is being started.")
    except RPCError as error:
        fail(f"The Temporal service refused the request: {error.message}.")
    except DBAPIError as error:
        fail(f"PostgreSQL refused the request: {error.orig}.")


def fail(message: str, code: int = FAILURE) -> NoReturn:
    """Print why and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


def leave(code: int) -> NoReturn:
    """Exit without interpreter finalisation, output flushed: the Temporal SDK's threads can crash it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
