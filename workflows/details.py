"""Markdown for the Temporal UI: what happened, readable without another tool. Pure functions of counts and ids.

Tables hold what is short; sentences stand below them, where the UI has room.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from configs.failure import FailureConfig, floor_of
from workflows.messages import BudgetState, Failure, GroupParked, GroupResult, RolloutResult, StepResult

_MAX_REASON_CHARS = 160
_GAP = "\N{EM SPACE}"
_MAX_NAMED_ROLLOUTS = 16
_ARGUMENT = '`{"actor": "YOU", "reason": "WHY"}`'


def _short(text: str | None, chars: int = _MAX_REASON_CHARS) -> str:
    flat = " ".join((text or "").split())
    return flat if len(flat) <= chars else flat[: chars - 1] + "…"


def _cell(text: str | None, chars: int = _MAX_REASON_CHARS) -> str:
    return _short(text, chars).replace("\\", "\\\\").replace("|", "\\|")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # The Temporal UI draws tables without any space between columns.
    lines = ["| " + f"{_GAP} | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + f"{_GAP} | ".join(row) + " |" for row in rows])


def _page(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def group_details(
    state: str,
    num_rollouts: int,
    results: Mapping[int, RolloutResult],
    failures: Mapping[int, Failure],
    reason: str | None = None,
    parked: str | None = None,
) -> str:
    """A group's rollouts: state, attempts, class of the last failure, model calls of the settled attempt, calls that
    were replayed and generated for all attempts, reward, oldest policy version; below, why each failed; and `parked`,
    how to go on."""
    rows: list[list[str]] = []
    reasons: list[str] = []
    for index in range(num_rollouts):
        result, failure = results.get(index), failures.get(index)
        why = result.reason if result and result.reason else None
        if why is None and failure is not None:
            attempt = "" if failure.attempt is None else f"attempt {failure.attempt}: "
            why = f"{attempt}{failure.failure_class} ({failure.boundary}): {failure.cause}"
        if why is not None:
            reasons.append(f"rollout {index}: {_cell(why)}")
        rows.append([str(index), *_rollout(result, failure)])
    header = ("rollout", "state", "attempts", "class", "turns", "replayed / generated", "reward", "policy")
    title = f"**{state}**" + (f": {_cell(reason)}" if reason else "")
    return _page(title, _table(header, rows), _bullets(reasons), parked)


def _rollout(result: RolloutResult | None, failure: Failure | None) -> list[str]:
    failure_class = "" if failure is None else _cell(failure.failure_class, 40)
    if result is None:
        attempts = "" if failure is None or failure.attempt is None else str(failure.attempt + 1)
        return ["open", attempts, failure_class, *[""] * 4]
    return [
        result.state,
        str(result.attempts),
        failure_class,
        str(result.model_calls),
        f"{result.replayed_calls} / {result.generated_calls}",
        "" if result.reward is None else f"{result.reward:.3f}",
        "" if result.policy_version is None else str(result.policy_version),
    ]


def parked_group(group_id: str, results: Mapping[int, RolloutResult], until: datetime) -> str:
    """How an operator goes on with a parked group: what is possible in this state, as commands and as updates."""
    states = {result.state for result in results.values()}
    ways = list[tuple[str, str, str]]()
    if "lost" in states:
        ways.append(("retry", "", "run the lost rollouts again; `--fresh` replays nothing"))
        ways.append(("mask", " --rollout I", "let one keep its place without a vote"))
    if "valid" in states:
        ways.append(("mask", " --all", "train what is valid"))
    ways.append(("drop", "", "give the group up"))
    commands = [f"`onbelay group {verb} {group_id}{option} --reason WHY`: {does}" for verb, option, does in ways]
    updates = " or ".join(f"`{name}`" for name in dict.fromkeys(verb for verb, _, _ in ways))
    return _page(
        f"Waits for an operator until {_moment(until)}; then it is dropped. To go on:",
        _bullets([*commands, f"or send the update {updates} with {_ARGUMENT}"]),
    )


def shortfall(prompt_id: str, needed: int, num_rollouts: int, results: Mapping[int, RolloutResult]) -> str:
    """Why a group cannot train: its prompt, and for each rollout that is not valid how many attempts it had and why."""
    valid = sum(result.state == "valid" for result in results.values())
    failed = [result for _, result in sorted(results.items()) if result.state != "valid"]
    named = [_ended(result) for result in failed[:_MAX_NAMED_ROLLOUTS]]
    if len(failed) > _MAX_NAMED_ROLLOUTS:
        named.append(f"and {len(failed) - _MAX_NAMED_ROLLOUTS} more")
    have = f"{valid} of {num_rollouts} rollouts are valid"
    needs = f"{needed} are needed" if valid < needed else "none may be lost"
    return f"prompt {prompt_id}: {have}, {needs} ({'; '.join(named)})"


def _ended(result: RolloutResult) -> str:
    attempts = 0 if result.attempt is None else result.attempt + 1
    why = f": {_short(result.reason, 80)}" if result.reason else ""
    return f"rollout-{result.index} {result.state} after {_plural(attempts, 'attempt')}{why}"


def step_details(
    phase: str,
    groups: Sequence[GroupResult],
    expected: int,
    parked: str | None = None,
    open_groups: Sequence[tuple[int, str, str]] = (),
    parked_groups: Sequence[GroupParked] = (),
    set_aside: str | None = None,
) -> str:
    """A step's groups in the order of their slots; below, why groups were dropped; and `parked`, how to go on.

    `open_groups` are those that have not ended: slot, group id, prompt id; `parked_groups` those of them that wait for
    an operator. `set_aside` sums up the groups without a signal: they have no rows, since they may be many.
    """
    waiting = {group.group_id: group for group in parked_groups}
    rows = [
        (
            group.slot,
            [
                f"`{group.group_id}`",
                group.state,
                _cell(group.prompt_id, 60),
                _cell(", ".join(group.failure_classes), 60),
                f"{group.valid} / {group.masked} / {group.lost}",
                "" if group.mean_reward is None else f"{group.mean_reward:.3f}",
            ],
        )
        for group in groups
    ]
    reasons = [(group.slot, group.reason) for group in groups if group.reason]
    for slot, name, prompt in open_groups:
        group = waiting.get(name)
        classes = "" if group is None else _cell(", ".join(group.failure_classes), 60)
        rows.append((slot, [f"`{name}`", "open" if group is None else "parked", _cell(prompt, 60), classes, "", ""]))
        reasons += [] if group is None or group.reason is None else [(slot, group.reason)]
    header = ("slot", "group", "state", "prompt", "class", "valid / masked / lost", "mean reward")
    table = _table(header, [[str(slot), *row] for slot, row in sorted(rows, key=lambda each: each[0])])
    told = _bullets([f"slot {slot}: {_cell(reason)}" for slot, reason in sorted(reasons)])
    return _page(f"**{phase}**, {len(groups)} of {expected} groups ended", table, set_aside, told, parked)


def parked_step(step_id: str, lost: Sequence[GroupResult], left: int, floor: int, until: datetime) -> str:
    """How an operator goes on with a step that is below its floor: what it lost, and the commands."""
    run_id = step_id.rpartition("/")[0]
    losses = [f"`{group.group_id}` ({_cell(group.prompt_id, 60)}): {_cell(group.reason)}" for group in lost]
    commands = [
        *(f"`onbelay group retry {group.group_id} --reason WHY`" for group in lost[:_MAX_NAMED_ROLLOUTS]),
        f"`onbelay run set-floor {run_id} FRACTION --reason WHY`: train with fewer groups",
        'or send the update `retry_group` with `{"group_id": "ID", "actor": "YOU", "reason": "WHY"}`',
    ]
    return _page(
        f"{step_id} lost {_plural(len(lost), 'group')} and keeps {left}, below its floor of {floor}:",
        _bullets(losses),
        f"Waits for an operator until {_moment(until)}; then the run ends. To go on:",
        _bullets(commands),
    )


def run_details(
    state: str,
    last_steps: Sequence[StepResult],
    next_step: int,
    max_steps: int,
    *,
    failure: FailureConfig,
    prompts: int,
    budgets: BudgetState | None = None,
    in_flight: Sequence[int] = (),
    waits_for: str | None = None,
) -> str:
    """A run's last steps, newest first; what is in flight and waited for; drop budgets, used of what there is."""
    some_set_aside = any(step.set_aside for step in last_steps)
    rows = [
        [
            str(step.step),
            f"{step.mean_reward:.3f}",
            str(step.trained),
            str(step.dropped),
            *([str(step.set_aside)] if some_set_aside else []),
            f"policy-{step.weights.version}" if step.weights else step.state,
        ]
        for step in reversed(last_steps)
    ]
    aside = ["set aside"] if some_set_aside else []
    header = ("step", "mean reward", "groups trained", "groups dropped", *aside, "then")
    used = budgets or BudgetState()
    facts = [
        f"in flight: {', '.join(f'step {step}' for step in in_flight) or 'nothing'}",
        f"dropped in a row: {used.consecutive_drops} of {failure.max_consecutive_dropped_prompts}",
        f"skipped: {used.skipped_prompts} of {failure.max_skipped_prompts}",
        f"floor: {floor_of(prompts, failure.min_step_batch_fraction)} of {_plural(prompts, 'group')}",
        *([f"waits for: {_cell(waits_for)}"] if waits_for else []),
    ]
    return _page(f"**{state}**, step {next_step} of {max_steps}", _bullets(facts), _table(header, rows))


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S %Z").strip()
