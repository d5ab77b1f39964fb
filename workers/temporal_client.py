"""One way to the Temporal service: pydantic payloads, TLS and API key from the configuration, finite patience.

A service that cannot be reached is a `TemporalUnavailable` that names the address; a service that goes away later is
no error here: workers keep polling until it is back.
"""

import asyncio
import logging
from pathlib import Path

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError, TLSConfig

from configs.temporal import TemporalConfig, TlsConfig

CONNECT_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 1.0

logger = logging.getLogger(__name__)


class TemporalUnavailable(RuntimeError):
    """The Temporal service does not answer, or refuses us."""


async def connect(config: TemporalConfig, patience_s: float = 0.0) -> Client:
    """Connect, and try again for `patience_s` seconds (0: one try)."""
    if config.address is None:
        raise TemporalUnavailable(
            "temporal.address is not set and no embedded Temporal service is running: start the stack with "
            "`onbelay up`, or give the host:port of a service in temporal.address."
        )
    tls = _tls(config.tls)  # unreadable files are an error at once, not after the patience is used up
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await asyncio.wait_for(_connect_once(config, config.address, tls), CONNECT_TIMEOUT_S)
        except (RuntimeError, RPCError, OSError, ValueError) as error:
            cause = str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            if loop.time() + RETRY_PAUSE_S > deadline or isinstance(error, ValueError):  # not an address at all
                raise TemporalUnavailable(
                    f"The Temporal service at {config.address} (temporal.address, namespace {config.namespace}) "
                    f"cannot be used: {cause}. Check that it runs, that the address is right, and the TLS and API key "
                    "settings of `temporal`."
                ) from error
            logger.warning("waiting for the Temporal service at %s: %s", config.address, cause)
            await asyncio.sleep(RETRY_PAUSE_S)


async def _connect_once(config: TemporalConfig, address: str, tls: TLSConfig | bool) -> Client:
    return await Client.connect(
        address,
        namespace=config.namespace,
        data_converter=pydantic_data_converter,
        api_key=config.api_key.get_secret_value() if config.api_key else None,
        tls=tls,
    )


def _tls(config: TlsConfig | None) -> TLSConfig | bool:
    if config is None:
        return False
    return TLSConfig(
        server_root_ca_cert=_read("server_root_ca", config.server_root_ca),
        client_cert=_read("client_cert", config.client_cert),
        client_private_key=_read("client_key", config.client_key),
        domain=config.domain,
    )


def _read(key: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise TemporalUnavailable(f"temporal.tls.{key}: cannot read {path}: {error.strerror}.") from error
