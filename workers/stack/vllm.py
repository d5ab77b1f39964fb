"""The embedded vLLM server: the policy of a recipe, on loopback, in the vLLM environment."""

from configs.recipe import Recipe
from workers.environments.paths import child_environment, environment_python
from workers.stack.ports import LOOPBACK
from workers.stack.probes import vllm_answers
from workers.stack.service import Launch, Service
from workers.stack.vllm_command import vllm_command

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0


class EmbeddedVllm:
    """One server; `generation.embedded.port` of the recipe must be a real port."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @property
    def url(self) -> str:
        """Base URL, without /v1."""
        return f"http://{LOOPBACK}:{self._recipe.generation.embedded.port}"

    def service(self) -> Service:
        """The supervised server."""
        return Service(
            name="vllm",
            launch=self.launch,
            ready=lambda: vllm_answers(self.url),
            ready_timeout_s=READY_TIMEOUT_S,
            stop_timeout_s=STOP_TIMEOUT_S,
            address=self.url,
        )

    async def launch(self) -> Launch:
        """The command."""
        argv, env = vllm_command(self._recipe, environment_python("vllm"))
        return Launch(tuple(argv), {**child_environment(), **env})
