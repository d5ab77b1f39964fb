"""Is a server there? Each probe returns when it is, and raises an error that says what it saw otherwise."""

import ssl
from functools import cache

import httpx

from configs.temporal import TemporalConfig
from workers.stack.errors import StackError
from workers.stack.search_attributes import SEARCH_ATTRIBUTES, missing_search_attributes, register_search_attributes
from workers.temporal_client import connect

TIMEOUT_S = 5.0


class NoAnswer(StackError):
    """A server that should be there is not, or answers wrongly."""


async def vllm_answers(url: str) -> None:
    """vLLM says that it is healthy (it does when the model is loaded)."""
    response = await _get(f"{url.rstrip('/')}/health", "vLLM")
    if response.status_code != httpx.codes.OK:
        raise NoAnswer(f"vLLM at {url} answers /health with status {response.status_code}: see its log.")


async def gym_answers(name: str, url: str) -> None:
    """A Gym server answers anything at all; they have no health route."""
    await _get(url, f"the Gym server {name}")


async def temporal_has_attributes(config: TemporalConfig) -> None:
    """The namespace of an existing service has the search attributes, or gets them now."""
    client = await connect(config)
    try:
        await register_search_attributes(client)
    except Exception as error:  # refused (Temporal Cloud, missing permission), or too slow
        missing = await missing_search_attributes(client)
        if not missing:
            return
        raise NoAnswer(
            f"The namespace {config.namespace} at {config.address} lacks search attributes, and registering them was "
            f"refused ({error}). Register them, e.g. `{registration_command(config.namespace, missing)}`."
        ) from error


def registration_command(namespace: str, names: list[str]) -> str:
    """What an administrator types to add search attributes."""
    kinds = {2: "Keyword", 3: "Int", 4: "Double", 7: "KeywordList"}
    pairs = " ".join(f"--name {name} --type {kinds[SEARCH_ATTRIBUTES[name]]}" for name in names)
    return f"temporal operator search-attribute create --namespace {namespace} {pairs}"


async def _get(url: str, who: str) -> httpx.Response:
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=_certificates()) as client:
            return await client.get(url)
    except httpx.HTTPError as error:
        raise NoAnswer(f"No answer from {who} at {url}: {str(error) or type(error).__name__}.") from error


@cache
def _certificates() -> ssl.SSLContext:
    """httpx's own; to read them for every probe would take a fifth of a core from the servers that start."""
    return httpx.create_ssl_context(trust_env=False)
