"""The ledger of the Gym process, open while it serves, and the policy models that record in it.

Nothing is served before the ledger has its tables, every endpoint answers, and the served chat template is proven fit.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from nemo_gym.token_id_capture.protocols import install_lineage_store, install_token_sink

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.captures import Captures
from storage.database import Database
from storage.errors import BlobUrlInvalid, DsnInvalid, LedgerUnavailable, RoleMissing, SchemaOutdated, StorageError
from storage.migrate import check_schema
from storage.model_calls import ModelCalls
from storage.quarantines import Quarantines
from workers.gym.capture.backend import CaptureBackend, install
from workers.gym.capture.lineage import LedgerLineage
from workers.gym.capture.sink import LedgerTokenSink
from workers.gym.errors import GymStartError
from workers.gym.policy_model.app import PolicyModel
from workers.gym.policy_model.errors import GenerationUnavailable, ModelCallFailed, TemplateUnfit
from workers.gym.policy_model.fleet import Fleet
from workers.gym.policy_model.recorder import Recorder
from workers.gym.servers import BuiltServer

PATIENCE_S = 600.0  # with servers that are being started: as long as vLLM may take
RETRY_PERIOD_S = 0.5


def install_capture() -> None:
    """Give NeMo-Gym the sink and the resolver; before its servers are built, which look for them."""
    install_token_sink(LedgerTokenSink())
    install_lineage_store(LedgerLineage())


def policy_models(built: Iterable[BuiltServer]) -> dict[str, PolicyModel]:
    """The servers that record, by name."""
    return {name: instance for name, instance, _ in built if isinstance(instance, PolicyModel)}


@asynccontextmanager
async def recording(storage: StorageConfig, models: Mapping[str, PolicyModel]) -> AsyncIterator[None]:
    """Connect the policy models, by name, with the ledger; GymStartError when that cannot be."""
    try:
        database = Database(storage)
        calls = ModelCalls(database, BlobStore(storage.blobs_url))
    except (DsnInvalid, BlobUrlInvalid) as error:
        raise GymStartError(f"{', '.join(models)} would record every model call, but {error}") from error
    recorder = Recorder(calls, storage.record_timeout_s)
    install(CaptureBackend(Captures(database), calls, storage.record_timeout_s))
    fleet = Fleet(Quarantines(database).open)
    watching: asyncio.Task[None] | None = None
    try:
        await _patiently(lambda: check_schema(database), LedgerUnavailable, RoleMissing, SchemaOutdated)
        await _patiently(fleet.refresh, LedgerUnavailable, TimeoutError)
        for name, model in models.items():
            await _connected(name, model, recorder, fleet)
        watching = asyncio.create_task(fleet.watch(lambda: _check_released(models.values())))
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await recorder.close()
        await database.close()


async def _check_released(models: Iterable[PolicyModel]) -> None:
    for model in models:
        await model.check_released()


async def _connected(name: str, model: PolicyModel, recorder: Recorder, fleet: Fleet) -> None:
    try:
        await _patiently(lambda: model.connect(recorder, fleet), GenerationUnavailable)
    except (TemplateUnfit, ModelCallFailed) as error:
        raise GymStartError(f"gym.servers.{name} cannot serve the policy of its endpoints. {error}") from error


async def _patiently(work: Callable[[], Awaitable[None]], *passing: type[Exception]) -> None:
    """Try until it works, fails for good, or PATIENCE_S are over."""
    last: Exception | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await work()
                except passing as error:
                    last = error
                await asyncio.sleep(RETRY_PERIOD_S)
    except TimeoutError as error:
        raise GymStartError(f"Gave up after {PATIENCE_S:g} s. {last or 'There was no answer.'}") from error
    except StorageError as error:
        raise GymStartError(str(error)) from error
