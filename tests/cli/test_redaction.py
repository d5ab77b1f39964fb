"""What leaves the machine has no secret of the recipe in it, wherever it stood."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from configs.recipe import Recipe
from workers.cli.redaction import REMOVED, Redactor

RECIPE = Recipe.model_validate(
    {
        "run": {"model": "m", "dataset": "d"},
        "storage": {"dsn": "postgresql://onbelay:pa%2Fss-word@db/ledger"},
        "temporal": {"api_key": "tmprl-key-1"},
        "gym": {
            "servers": {
                "agent": {
                    "type": "responses_api_agents",
                    "implementation": "x",
                    "config": {"judge_api_key": "sk-judge", "name": "plain", "model": {"openai_token": "tok-2"}},
                }
            }
        },
    }
)
SECRETS = ("pa%2Fss-word", "pa/ss-word", "tmprl-key-1", "sk-judge", "tok-2")
CLEAN = Redactor([RECIPE])


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_of_the_recipe_are_removed_wherever_they_stand(secret: str) -> None:
    assert CLEAN.text(f"failed with {secret}.") == f"failed with {REMOVED}."


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("GET http://user:pw@host:80/x?y=1", "GET http://[removed]@host:80/x?y=1"),
        ("postgresql://a:b@c@db/x", "postgresql://[removed]@db/x"),
        ("Authorization: Bearer abc.def", "Authorization: [removed]"),
        ('{"authorization": "Basic dXNlcg=="}', '{"authorization": "[removed]"}'),
        ("x-api-key=12345", "x-api-key=[removed]"),
        ("sent Bearer eyJhbGciOi.JIUzI1NiJ9", "sent Bearer [removed]"),
        ("see https://host/path and mail me@host", "see https://host/path and mail me@host"),
        ("group r/step-0/group-1 is parked", "group r/step-0/group-1 is parked"),
    ],
)
def test_urls_and_headers_lose_their_secrets_and_nothing_else(text: str, clean: str) -> None:
    assert CLEAN.text(text) == clean


def test_temporals_payloads_are_looked_into_and_stay_payloads() -> None:
    def encoded(value: JsonValue) -> str:
        return base64.b64encode(json.dumps(value).encode()).decode()

    history = {"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": encoded({"cause": "http://u:p@h", "n": [1, 2.5]})}
    cleaned = CLEAN.value({"input": {"payloads": [history]}})
    payload = cleaned["input"]["payloads"][0]
    assert payload["metadata"] == history["metadata"]
    assert json.loads(base64.b64decode(payload["data"])) == {"cause": "http://[removed]@h", "n": [1, 2.5]}


def test_a_payload_that_is_no_text_stays_as_it_is() -> None:
    data = {"metadata": {}, "data": base64.b64encode(b"\xff\xfe\x00").decode()}
    assert CLEAN.value(data) == data


def test_values_under_the_names_of_secrets_are_removed() -> None:
    assert CLEAN.value({"api_key": "anything", "tokens": 3, "headers": {"Authorization": "z"}}) == {
        "api_key": REMOVED,
        "tokens": 3,
        "headers": {"Authorization": REMOVED},
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([*SECRETS, "plain", "x"]) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_no_secret_survives_in_any_json(value: JsonValue) -> None:
    cleaned = json.dumps(CLEAN.value(value), ensure_ascii=False)
    assert not any(secret in cleaned for secret in SECRETS)
    assert CLEAN.value(CLEAN.value(value)) == CLEAN.value(value)
