"""NeMo-Gym's own HTTP client as the endpoint of the exact-token route."""

import json

import pytest

from tests.gym.forks import Forks
from tests.gym.sampling_vllm import SamplingVllm

pytestmark = pytest.mark.integration

CONFIGURATION = json.dumps({"head_server": {"host": "127.0.0.1", "port": 1}})  # never asked


Outcome = tuple[str, int, object]
Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What became of requests to a server with faults, and to one that is gone; asked in one process, for speed."""
    with SamplingVllm(lambda messages: pytest.fail("asked")) as gone:
        pass
    with SamplingVllm(lambda messages: pytest.fail("asked")) as vllm:
        vllm.fail_next(400, "The decoder prompt (length 9) is longer than the maximum model length of 8.", path="/1")
        vllm.fail_next(422, "no", path="/2")
        vllm.fail_next(503, "full", times=3, path="/3")  # NeMo-Gym asks three times
        vllm.drop_next(times=2, path="/4")
        asked = {"too long": "/1", "refused": "/2", "full": "/3", "dropped": "/4", "well": "/v1/models"}
        requests = [[vllm.url, path] for path in asked.values()] + [[gone.url, "/health"]]
        variables = {"REQUESTS": json.dumps(requests), "NEMO_GYM_CONFIG_DICT": CONFIGURATION}
        folder = tmp_path_factory.mktemp("requests")
        output = forks.output("tests.gym.exact.through_gym_client", folder=folder, variables=variables)
    seen = json.loads(output.splitlines()[-1])
    return {name: tuple(outcome) for name, outcome in zip([*asked, "gone"], seen, strict=True)}


def test_an_answer_passes_through(outcomes: Outcomes) -> None:
    kind, _, answer = outcomes["well"]
    assert kind == "answer"
    assert "policy" in str(answer)


def test_a_prompt_that_is_too_long_is_named_in_nemo_gyms_words(outcomes: Outcomes) -> None:
    kind, status, cause = outcomes["too long"]
    assert (kind, status) == ("ContextOverflow", 400)
    assert "maximum context length" in str(cause)


def test_a_refusal_keeps_its_status_and_words(outcomes: Outcomes) -> None:
    kind, status, cause = outcomes["refused"]
    assert (kind, status) == ("GenerationRefused", 422)
    assert "no" in str(cause)


@pytest.mark.parametrize("fault", ["full", "dropped", "gone"])
def test_a_server_that_fails_each_time_is_unavailable(outcomes: Outcomes, fault: str) -> None:
    assert outcomes[fault][:2] == ("GenerationUnavailable", 503)


def test_the_answer_of_a_server_that_failed_to_the_last_is_quoted(outcomes: Outcomes) -> None:
    assert "full" in str(outcomes["full"][2])
