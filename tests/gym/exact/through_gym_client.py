"""Asks a vLLM server through NeMo-Gym's client, in the NeMo-Gym environment, and writes what became of each request.

The variable REQUESTS is `[[url, path], ...]`: NeMo-Gym reads the command line itself.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
import json
import os
import sys

from nemo_gym.openai_utils import NeMoGymAsyncOpenAI

from workers.gym.policy_model.errors import ModelCallFailed
from workers.gym.policy_model.gym_endpoint import GymEndpoint


async def outcomes(requests: list[list[str]]) -> list[list[object]]:
    """Failure class, status and cause of each request, or its answer."""
    seen: list[list[object]] = []
    for url, path in requests:
        endpoint = GymEndpoint(NeMoGymAsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_connection_retries=1))
        try:
            seen.append(["answer", 200, await endpoint.get(path)])
        except ModelCallFailed as error:
            seen.append([error.failure_class, int(error.status), error.cause])
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(outcomes(json.loads(os.environ["REQUESTS"])))) + "\n")
