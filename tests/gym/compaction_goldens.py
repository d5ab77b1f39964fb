"""What NeMo-Gym's compaction agent decides, asked of its own classes and printed as JSON.

Run as a module in the Gym environment; the numbers are judged by the test of the same name.
"""

# pyright: reportMissingImports=false
# NeMo-Gym is installed in another environment than the type checker's.

import json
import sys
from typing import Any

from responses_api_agents.simple_agent_with_compaction.compaction import (
    ContextGuardConfig,
    ContextMeasurements,
    ImageRecencyConfig,
    ReasoningRecencyConfig,
    RecencyHistoryPolicy,
    RecencyHistoryPolicyConfig,
    SemanticHistory,
    TurnChunkedHistoryController,
    evaluate_context_guards,
    materialize_history_view,
)

Item = dict[str, Any]


def refused(prompt_tokens: int) -> bool:
    """Whether the guard refuses a prompt: at most 1000 tokens, 200 of them reserved for the reply."""
    config = ContextGuardConfig(max_total_tokens=1000, reserved_generation_tokens=200)
    measured = ContextMeasurements(prompt_token_count=prompt_tokens, active_image_count=0, vision_token_count=0)
    return any(evaluation.exceeded for evaluation in evaluate_context_guards(config, measured))


def chunks() -> list[tuple[int, str | None]]:
    """Actions of each chunk and why it closed early: chunks of 3, an episode of 7 actions."""
    history, controller = _chunked()
    for turn in range(1, 8):
        prepared = controller.prepare(applies_to_step=turn)
        controller.acknowledge_action(prepared, action_id=f"action-{turn}", completion_id=f"completion-{turn}")
        history.append_items([{"role": "assistant", "type": "message", "content": f"action {turn}"}], turn_id=turn)
    controller.finalize_terminal()
    return [(record.actual_action_count, record.early_close_reason) for record in controller.chunk_records]


def first_call_can_close() -> bool:
    """Whether a guard finds a chunk to close before the first action."""
    _, controller = _chunked()
    controller.prepare(applies_to_step=1)
    return controller.close_for_guard(guard_name="total_tokens")


def kept_images(keep_last_groups: int) -> Item:
    """What is left of an initial image, three old ones and one that the next action has not seen."""
    history = SemanticHistory("rollout")
    history.append_items([_observation("i0")], turn_id=0, is_initial_context=True)
    for turn in (1, 2, 3):
        history.append_items([_observation(f"i{turn}")], turn_id=turn)
    history.append_items([_observation("i4")], turn_id=4, conditions_action_turn=5)
    images = ImageRecencyConfig(enabled=True, protect_initial_context=True, keep_last_groups=keep_last_groups)
    policy = RecencyHistoryPolicy(RecencyHistoryPolicyConfig(images=images))
    items = materialize_history_view(history, policy.plan(history, decision_turn=5)).items
    parts = [part for item in items for part in item["content"]]
    return {
        "images": [part["image_url"] for part in parts if part["type"] == "input_image"],
        "markers": [part["text"] for part in parts if part["type"] == "input_text"].count("[Earlier image omitted]"),
    }


def _chunked() -> tuple[SemanticHistory, TurnChunkedHistoryController]:
    history = SemanticHistory("rollout")
    history.append_items([{"role": "user", "type": "message", "content": "climb"}], turn_id=0, is_initial_context=True)
    reasoning = ReasoningRecencyConfig(enabled=True, keep_last_blocks=1)
    policy = RecencyHistoryPolicy(RecencyHistoryPolicyConfig(reasoning=reasoning))
    return history, TurnChunkedHistoryController(history, policy, actions_per_chunk=3)


def _observation(image: str) -> Item:
    content = [{"type": "input_image", "image_url": image, "detail": "auto"}, {"type": "input_text", "text": image}]
    return {"role": "user", "type": "message", "content": content}


if __name__ == "__main__":
    decided = {
        "refused": {tokens: refused(tokens) for tokens in (800, 801)},
        "chunks": chunks(),
        "first_call_can_close": first_call_can_close(),
        "kept_images": {groups: kept_images(groups) for groups in (0, 2)},
    }
    sys.stdout.write(json.dumps(decided))
