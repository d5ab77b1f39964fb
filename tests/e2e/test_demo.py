"""The main job on the embedded stack."""

import json
from pathlib import Path

import pytest

from tests.e2e.stack import FREE_PORTS, POLICY, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


async def test_demo_trains_three_steps_on_valid_rollouts_and_its_accounts_add_up(stack: Stack, tmp_path: Path) -> None:
    summary_file, plot = tmp_path / "summary.json", tmp_path / "reward.png"
    files = ("--json", str(summary_file), "--plot", str(plot))

    output = await stack.ok("demo", "--keep", *files, *POLICY, *FREE_PORTS, *stack.folders)

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
