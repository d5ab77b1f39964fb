"""A cancellation that comes in the same moment as what is waited for is swallowed by the wait, and must not be lost: a
cancelled step would ask for groups, and wait for steps, that are no more."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from workflows import lending, tasks
from workflows.lending import Lending
from workflows.messages import LendGroup, Lent
from workflows.tasks import Tasks

PATIENCE_S = 60.0
QUESTION = LendGroup(borrower=0, lost="run/step-0/group-0", replacements_used=0)
Wait = Callable[..., Awaitable[bool]]


async def swallowing(*_: object, **__: object) -> bool:
    """A wait whose end and whose cancellation come together: it returns as if nothing else had happened."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return True
    return False


async def endless(*_: object, **__: object) -> bool:
    """A wait for what never comes."""
    return await asyncio.Event().wait()


async def assert_ends_cancelled(work: Awaitable[object]) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    task.cancel()
    ended, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert ended
    assert task.cancelled()


@pytest.mark.parametrize(("tell", "wait"), [(swallowing, endless), (endless, swallowing)], ids=["signal", "answer"])
async def test_a_step_that_asks_for_a_group_ends(tell: Wait, wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Lending("run", timedelta(days=1))

    async def told(*_: object) -> bool:
        return await tell() if tell is swallowing else True

    async def waited(*_: object, **__: object) -> None:
        await wait()
        asking.answered(Lent(lender=1, lost=QUESTION.lost))

    monkeypatch.setattr(lending, "tell", told)
    monkeypatch.setattr(lending.workflow, "wait_condition", waited)
    await assert_ends_cancelled(asking.ask(1, QUESTION))


async def test_a_workflow_that_waits_for_its_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.workflow, "wait_condition", swallowing)
    await assert_ends_cancelled(Tasks().until(lambda: True, timedelta(days=1)))


async def test_one_whose_earlier_wait_swallowed_it_ends_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.workflow, "wait_condition", endless)

    async def work() -> None:
        await swallowing()
        await Tasks().until(lambda: False)

    await assert_ends_cancelled(work())
