"""The main job on the embedded stack."""

import json
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.stack import FREE_PORTS, POLICY, Stack
from workers.stack.control import resolved_recipe

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


async def test_demo_trains_three_steps_on_valid_rollouts_and_its_accounts_add_up(stack: Stack, tmp_path: Path) -> None:
    summary_file, plot = tmp_path / "summary.json", tmp_path / "reward.png"
    files = ("--json", str(summary_file), "--plot", str(plot))

    output = await stack.ok("demo", "--keep", *files, *POLICY, *FREE_PORTS, *stack.folders, "grpo.max_val_samples=4")

    summary = json.loads(summary_file.read_text())
    assert json.dumps(summary, indent=2) in output
    assert (summary["state"], summary["steps_applied"], summary["refits"], summary["policy_version"]) == (
        "completed",
        3,
        4,
        3,
    )
    groups = summary["groups"]
    assert (groups["dispatched"], groups["trained"], groups["dropped"], groups["parked"], groups["open"]) == (
        6,
        6,
        0,
        0,
        0,
    )
    assert summary["rollouts"] == {"dispatched": 24, "valid": 24, "masked": 0, "lost": 0, "open": 0}
    assert summary["model_calls"]["generated"] >= 96
    # The demo kills its agent server in step 2: every rollout that was cut off goes on where it was.
    replayed = summary["model_calls"]["replayed"]
    assert summary["attempts"]["failed"] > 0
    assert replayed > 0
    assert f"replayed {replayed} recorded calls ({summary['tokens']['replayed']} tokens) from the ledger" in output
    assert summary["rows"]["trained"] > 24
    assert summary["rows"]["segments_max"] >= 2
    assert summary["tokens"]["trained"] <= summary["tokens"]["generated"]
    assert await stack.ok("ledger", "check", summary["run_id"]) == f"{summary['run_id']}: every invariant holds.\n"
    output = await stack.ok("rollout", "show", f"{summary['run_id']}/step-2/group-0/rollout-0")
    assert "── segment 0 ──" in output
    assert "selected" in output
    output = await stack.ok("group", "show", f"{summary['run_id']}/step-0/group-0")
    assert "valid" in output
    assert len(summary["reward_by_step"]) == 3
    assert summary["identity_holds"] is True
    assert plot.read_bytes().startswith(b"\x89PNG")
    await assert_vllm_and_trainer_agree(stack, summary["run_id"])


async def assert_vllm_and_trainer_agree(stack: Stack, run_id: str) -> None:
    """After every refit: the trainer measured those before a step, the last one is measured here."""
    async with stack.session() as opened:
        gaps = [step["train/logprob_gap_max"] for step in (await opened.ledger.steps.metrics(run_id)).values()]
        newest = await opened.ledger.weights.newest(run_id)
    assert len(gaps) == 3
    assert 0 < max(gaps) < 1e-4
    assert newest is not None
    assert newest.version == 3
    recipe = resolved_recipe(stack.state_dir)
    assert recipe is not None
    url = str(recipe.generation.endpoints[0]).rstrip("/")
    sampling = {"max_tokens": 64, "temperature": 1.0, "seed": 0, "logprobs": 0, "ignore_eos": True}
    request = {"model": "policy", "token_ids": list(range(5, 37)), "sampling_params": sampling}
    async with httpx.AsyncClient(timeout=120) as client:
        choice = (await client.post(f"{url}/inference/v1/generate", json=request)).json()["choices"][0]
    assert [span["version"] for span in choice["weight_versions"]] == ["policy-3"]
    sampled = torch.tensor(choice["token_ids"])
    policy = AutoModelForCausalLM.from_pretrained(newest.path, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(torch.tensor([[*request["token_ids"], *choice["token_ids"]]])).logits[0, 31:-1]
    expected = torch.log_softmax(logits, -1).gather(1, sampled[:, None])[:, 0]
    found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert (found - expected).abs().max() < 1e-4
