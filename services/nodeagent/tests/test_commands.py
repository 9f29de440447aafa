"""A command acts at most once for its id, on the intended guest, and reports its result."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import NODE, Domains, Node, eventually, record, uid

from virtbus.bus.errors import BusError
from virtbus.nodeagent.commands import BEGUN, KEPT
from virtbus.nodeagent.core.ports import DomainChange, Ending
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError

A = uid(1)


class Stuck(Domains):
    """libvirt presses the button, and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.pressed = asyncio.Event()

    async def reset(self, of: str) -> bool:
        await super().reset(of)
        self.pressed.set()
        await asyncio.Event().wait()
        return True


class Gone(Domains):
    """The guest ends as the button is pressed."""

    async def reset(self, of: str) -> bool:
        await super().reset(of)
        return False


class Away(Domains):
    """libvirt ends during the call."""

    async def reset(self, of: str) -> bool:
        await super().reset(of)
        raise VirtbusError(Code.UNAVAILABLE, "libvirt_down", "libvirt does not answer")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def ask(
    node: Node, verb: str = "reset", *, once: str = "a", epoch: int = 1, timeout_s: float = 5.0
) -> Any:
    data = {"uid": A, "epoch": epoch, "verb": verb, "id": once}
    subject = subjects.rpc(NODE, "agent", "command")
    return await node.bus.request(subject, data, timeout_s=timeout_s, request_id=once)


async def refused(asking: Awaitable[Any]) -> tuple[int, str]:
    with pytest.raises(VirtbusError) as caught:
        await asking
    return caught.value.code, caught.value.reason


async def unanswered(node: Node) -> None:
    with pytest.raises(BusError):
        await ask(node, timeout_s=0.5)


async def runs(node: Node, state: str = "Running") -> None:
    async def so() -> bool:
        return await node.state(A) == state

    await eventually(so)


def pressed(node: Node) -> list[str]:
    return [what for what, _ in node.domains.done if what in {"reset", "reboot"}]


async def test_each_command_acts_once_for_any_repeats(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        for _ in range(3):
            await ask(node)
        await ask(node, "soft-reboot", once="b")
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(ask(node, once="c"))
        assert pressed(node) == ["reset", "reboot", "reset"]
    async with node.agent():
        await node.start_another()
        for once in ("a", "b", "c"):
            await ask(node, once=once)
        assert len(pressed(node)) == 3
        await ask(node, once="d")
        assert len(pressed(node)) == 4


async def test_an_agent_that_died_between_act_and_answer_does_not_act_again(node: Node) -> None:
    node.domains = domains = Stuck()
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        async with asyncio.TaskGroup() as group:
            group.create_task(unanswered(node))
            await domains.pressed.wait()
    async with node.agent():
        await node.start_another()
        assert await refused(ask(node)) == (Code.CONFLICT, "outcome_unknown")
        assert pressed(node) == ["reset"]


async def test_an_unanswered_command_of_libvirt_is_unknown_and_not_repeated(
    node: Node,
) -> None:
    node.domains = Away()
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        for _ in range(2):
            assert await refused(ask(node)) == (Code.CONFLICT, "outcome_unknown")
        assert pressed(node) == ["reset"]


async def test_a_command_too_late_for_its_guest_gives_the_same_answer_to_any_repeats(
    node: Node,
) -> None:
    node.domains = Gone()
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        for _ in range(2):
            assert await refused(ask(node)) == (Code.CONFLICT, "not_running")


async def test_a_command_for_another_assignment_is_refused(node: Node) -> None:
    await node.join()
    await node.put(record(epoch=2))
    async with node.agent():
        await runs(node)
        assert await refused(ask(node, epoch=1)) == (Code.CONFLICT, "moved")
        assert await refused(ask(node, epoch=3)) == (Code.CONFLICT, "moved")
        await ask(node, epoch=2, once="b")
        assert pressed(node) == ["reset"]


async def test_a_vm_that_is_off_or_not_here_is_refused_with_the_next_step(node: Node) -> None:
    await node.join()
    await node.put(record(powered=False))
    async with node.agent():
        await runs(node, "Stopped")
        assert await refused(ask(node)) == (Code.CONFLICT, "not_running")
        await node.bus.purge(subjects.vm_record(NODE, A))
        await eventually(lambda: node.domains.there.get(A) is None)
        assert (await refused(ask(node)))[0] in {Code.NOT_FOUND, Code.CONFLICT}
        assert pressed(node) == []


async def test_a_guest_that_has_just_ended_is_not_running(node: Node) -> None:
    await node.join()
    await node.put(record(spec={"run_strategy": "Once"}))
    async with node.agent():
        await runs(node)
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        assert await refused(ask(node)) == (Code.CONFLICT, "not_running")


async def test_a_paused_guest_is_reset_but_not_asked_to_reboot(node: Node) -> None:
    await node.join()
    await node.put(record(paused=True))
    async with node.agent():
        await runs(node, "Paused")
        assert await refused(ask(node, "soft-reboot")) == (Code.CONFLICT, "paused")
        await ask(node, once="b")
        assert pressed(node) == ["reset"]


async def test_a_held_vm_is_left_unchanged(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent() as agent:
        await runs(node)
        agent.vms.actors[A].hold("for a while")
        assert (await refused(ask(node)))[1] == "held"
        assert pressed(node) == []


async def test_the_memory_of_a_vm_is_bounded_and_removed_with_it(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        await node.files.keep_commands(A, {f"old-{n}": BEGUN for n in range(KEPT)})
        await ask(node)
        told = await node.files.commands(A)
        assert len(told) == KEPT
        assert next(iter(told)) == "old-1"
        assert told["a"] == "done"
        await node.bus.purge(subjects.vm_record(NODE, A))
        await eventually(lambda: not (node.files.vms / A).exists())
        await node.files.keep_commands(A, {"late": BEGUN})
        assert not (node.files.vms / A).exists()


async def test_an_unreadable_state_file_is_reported_and_blocks_nothing(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await runs(node)
        (node.files.vms / A / "commands").write_bytes(b"[1, 2")
        await ask(node)
        assert "unreadable commands" in caplog.text
