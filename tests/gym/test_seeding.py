"""A seeded run asks for the same samples as another one, and never twice for the same."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from workers.gym.policy_model.seeding import CallSeed, seeded, with_seeded_ids

CALL = CallSeed(7, "run/step-0/group-1/rollout-2", sample=0, occurrence=0)
INT64_MAX = 2**63 - 1

names = st.text("abc-_0123456789", min_size=1, max_size=8)
calls = st.builds(
    CallSeed,
    sampling_seed=st.integers(0, 2**70),
    rollout_id=st.builds("{}/step-{}/group-{}/rollout-{}".format, names, *[st.integers(0, 3)] * 3),
    sample=st.integers(0, 2),
    occurrence=st.integers(0, 2),
)
prompts = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@given(call=calls, prompt=prompts)
def test_a_number_fits_what_vllm_takes(call: CallSeed, prompt: list[int]) -> None:
    assert 0 <= call.after(prompt) <= INT64_MAX


@given(one=calls, other=calls, prompt=prompts, other_prompt=prompts)
def test_numbers_are_equal_exactly_where_everything_but_the_run_is(
    one: CallSeed, other: CallSeed, prompt: list[int], other_prompt: list[int]
) -> None:
    def identity(call: CallSeed) -> tuple[object, ...]:
        return dataclasses.astuple(dataclasses.replace(call, rollout_id=call.rollout_id.split("/", 1)[1]))

    equal = identity(one) == identity(other) and prompt == other_prompt
    assert (one.after(prompt) == other.after(other_prompt)) is equal


def test_a_number_stays_what_it_is_in_every_version_of_this_code() -> None:
    assert CALL.after([1, 2, 3]) == 8310754004747266492


def test_a_request_with_a_seed_of_its_own_keeps_it() -> None:
    rendered = {"token_ids": [1, 2], "sampling_params": {"temperature": 1.0, "seed": 5}}
    assert CALL.of(rendered) is None
    assert seeded(rendered, None) == rendered


def test_a_request_without_one_is_seeded_and_otherwise_left_alone() -> None:
    rendered = {"token_ids": [1, 2], "model": "policy", "sampling_params": {"temperature": 1.0, "seed": None}}
    number = CALL.of(rendered)
    assert number == CALL.after([1, 2])
    assert seeded(rendered, number) == {
        "token_ids": [1, 2],
        "model": "policy",
        "sampling_params": {"temperature": 1.0, "seed": number},
    }
    assert rendered["sampling_params"]["seed"] is None


def test_ids_of_tool_calls_follow_from_the_number_and_differ_within_a_turn() -> None:
    def message(*ids: str) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"id": one, "type": "function"} for one in ids]}

    first, second = with_seeded_ids(message("a", "b"), 3)["tool_calls"]
    assert first["id"] != second["id"]
    assert with_seeded_ids(message("c", "d"), 3)["tool_calls"] == [first, second]
    assert with_seeded_ids(message("a", "b"), 4)["tool_calls"] != [first, second]
    assert with_seeded_ids(message("a", "b"), None) == message("a", "b")
    assert with_seeded_ids({"role": "assistant", "content": "done"}, 3) == {"role": "assistant", "content": "done"}
