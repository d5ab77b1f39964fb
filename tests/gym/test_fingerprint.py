"""Equal requests are told from different ones by what can change their tokens."""

import json
import string

from hypothesis import given
from hypothesis import strategies as st

from workers.gym.policy_model.fingerprint import TRANSPORT_FIELDS, fingerprint

BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "turn"}}],
    "temperature": 1.0,
    "required_prefix_token_ids": [1, 2, 3],
}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(TRANSPORT_FIELDS)), value=values)
def test_names_and_transport_options_do_not_count(field: str, value: object) -> None:
    assert fingerprint({**BODY, field: value}, "contract") == fingerprint(BODY, "contract")


@given(field=st.text(string.ascii_lowercase, min_size=1, max_size=8), value=values)
def test_everything_else_counts(field: str, value: object) -> None:
    changed = {**BODY, field: value}
    counts = field not in TRANSPORT_FIELDS and changed != BODY
    assert (fingerprint(changed, "contract") != fingerprint(BODY, "contract")) == counts


def test_the_served_model_counts() -> None:
    assert fingerprint(BODY, "contract") != fingerprint(BODY, "another")


@given(body=st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_the_order_of_fields_does_not_count(body: dict[str, object]) -> None:
    turned_round = json.loads(json.dumps(dict(reversed(body.items()))))
    assert fingerprint(turned_round, "") == fingerprint(body, "")
