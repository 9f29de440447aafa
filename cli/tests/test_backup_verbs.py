"""Backups against a scripted controller."""

import asyncio
import errno
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Handler, Script, environment, start
from cli.tests.test_operation_verbs import view as operation_view

from virtbus.bus.client.ports import Request
from virtbus.cli.backup_serve import _cancelled_unless_done
from virtbus.cli.invocation import Invocation
from virtbus.schemas.backup import BackupDisk
from virtbus.schemas.backup_api import BackupPage, BackupView
from virtbus.schemas.backup_schedule import (
    BackupSchedulePage,
    BackupScheduleSpec,
    BackupScheduleView,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.operation import OperationPhase

pytestmark = pytest.mark.integration

ID = "0192f0c1-2d3e-7abc-8def-ba9876543210"
SPEC = {
    "domain": {
        "devices": {
            "disks": [{"name": "root"}, {"name": "seed"}],
            "interfaces": [{"name": "eth0", "mac_address": "02:00:00:00:00:01"}],
        }
    },
    "volumes": [
        {"name": "root", "image": {"ref": "tiny"}},
        {"name": "seed", "cloud_init_no_cloud": {}},
    ],
}


def view(**changes: Any) -> BackupView:
    known: dict[str, Any] = {
        "id": ID,
        "namespace": "default",
        "vm": "web",
        "uid": UID,
        "node": "n1",
        "created_ns": 1,
        "full_because": "it is the first backup of the VM",
        "size_bytes": 1024**3,
        "spec": SPEC,
        "disks": [BackupDisk(name="root", virtual_size_bytes=8 * 1024**3)],
    }
    return BackupView(**(known | changes))


async def test_a_create_waits_and_shows_why_the_backup_is_full(script: Script, cli: Cli) -> None:
    script.answer("backup", "create", operation_view(id=ID, kind="backup", result=None))
    script.answer("operation", "get", operation_view(id=ID, kind="backup", result=None))
    script.answer("backup", "get", view())
    ended = await cli("backup", "create", "web", "--id", ID, "--incremental", "--chain", "3")
    assert ended.code == 0, ended.err
    row = ended.out.splitlines()[1]
    assert row.split()[:6] == [ID, "default", "web", "n1", "full", "1GiB"]
    assert "full: it is the first backup of the VM" in row
    (asked,) = script.data("backup.create")
    wanted = {"vm": "web", "namespace": "default", "id": ID, "mode": "incremental", "chain": 3}
    assert asked == wanted


async def test_a_list_says_which_nodes_are_missing(script: Script, cli: Cli) -> None:
    page = BackupPage(items=(view(parent=UID, depth=2),), silent=("n2",))
    script.answer("backup", "list", page)
    ended = await cli("backup", "list", "--vm", "web")
    assert "increment 2" in ended.out
    assert "n2" in ended.err
    assert script.data("backup.list") == [{"vm": "web"}]


async def test_a_verification_that_fails_is_an_error(script: Script, cli: Cli) -> None:
    failed = operation_view(kind="verify", phase=OperationPhase.FAILED, result=None)
    script.answer("backup", "verify", failed)
    assert (await cli("backup", "verify", ID)).code != 0
    assert script.data("backup.verify")[0]["id"] == ID


async def test_a_delete_names_what_it_removed(script: Script, cli: Cli) -> None:
    script.answer("backup", "delete", view())
    ended = await cli("backup", "delete", ID, "--node", "n1")
    assert ended.out.splitlines() == [f"{ID} deleted"]
    assert script.data("backup.delete") == [{"id": ID, "node": "n1"}]


def schedule(**changes: Any) -> BackupScheduleView:
    spec = BackupScheduleSpec(vm="web", every_s=86_400, keep=7)
    known: dict[str, Any] = {"uid": UID, "namespace": "default", "name": "nightly", "spec": spec}
    known |= {"state": "Failed", "message": "no space", "next_ns": 5, "created_ns": 1}
    return BackupScheduleView(**(known | {"generation": 1, "revision": 3} | changes))


async def test_a_schedule_is_made_changed_and_ended(script: Script, cli: Cli) -> None:
    for action in ("create", "update", "delete"):
        script.answer("backup-schedule", action, schedule())
    words = ("backup", "schedule")
    ended = await cli(*words, "create", "nightly", "--vm", "web", "--every", "6h", "--uid", UID)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split()[:6] == [
        *("default", "nightly", "web", "86400s", "7", "Failed")
    ]
    (asked,) = script.data("backup-schedule.create")
    assert asked["spec"] == {"vm": "web", "every_s": 6 * 3600, "keep": 7}
    await cli(*words, "update", "nightly", "--suspend", "--keep", "3", "--no-verify")
    (asked,) = script.data("backup-schedule.update")
    wanted = {"name": "nightly", "namespace": "default", "keep": 3, "verify": False}
    assert asked == wanted | {"suspended": True}
    ended = await cli(*words, "delete", "nightly")
    assert ended.out.splitlines() == ["nightly deleted"]


@pytest.mark.parametrize(
    "wrong",
    [
        *(("backup", "create", "web", "--chain", number) for number in ("0", "-1")),
        *(
            ("backup", "schedule", verb, "nightly", *more, option, "0")
            for verb, more in (("create", ("--vm", "web")), ("update", ()))
            for option in ("--keep", "--chain")
        ),
    ],
)
async def test_a_number_below_one_is_refused_before_it_is_sent(
    script: Script, cli: Cli, wrong: tuple[str, ...]
) -> None:
    ended = await cli(*wrong)
    assert ended.code == 2, ended.err
    assert wrong[-2] in ended.err
    assert not script.asked


async def test_a_time_of_zero_is_sent_and_not_replaced(script: Script, cli: Cli) -> None:
    script.answer("backup-schedule", "create", schedule())
    await cli("backup", "schedule", "create", "nightly", "--vm", "web", "--every", "0s")
    assert script.data("backup-schedule.create")[0]["spec"]["every_s"] == 0
    await cli("backup", "serve", "web", "--for", "0s")
    assert script.data("backup.serve")[0]["within_s"] == 0


async def test_schedules_are_listed(script: Script, cli: Cli) -> None:
    script.answer("backup-schedule", "list", BackupSchedulePage(items=(schedule(),)))
    ended = await cli("backup", "schedule", "list")
    assert "no space" in ended.out


async def test_a_reader_that_succeeds_finishes_the_reading(script: Script, cli: Cli) -> None:
    served = operation_view(id=ID, kind="serve", phase=OperationPhase.RUNNING, step="serve")
    done = operation_view(id=ID, kind="serve", phase=OperationPhase.SUCCEEDED, result=None)
    script.answer("backup", "serve", served)
    script.answer("backup", "finish", done)
    more = ("--since", UID, "--for", "2m")
    told = ("sh", "-c", "test -S $VIRTBUS_NBD_SOCKET && echo it is there")
    ended = await cli("backup", "serve", "web", "--id", ID, *more, "--", *told)
    assert ended.code == 0, ended.err
    assert "it is there" in ended.out
    (asked,) = script.data("backup.serve")
    assert (asked["since"], asked["within_s"]) == (UID, 120)
    assert script.data("backup.finish") == [{"id": ID}]


async def test_a_reader_that_fails_cancels_the_reading(script: Script, cli: Cli) -> None:
    served = operation_view(id=ID, kind="serve", phase=OperationPhase.RUNNING, step="serve")
    script.answer("backup", "serve", served)
    script.answer("operation", "cancel", served)
    for command in (("false",), ("/nonexistent/reader",)):
        ended = await cli("backup", "serve", "web", "--id", ID, "--", *command)
        assert ended.code == 1
    assert script.data("operation.cancel") == [{"id": ID}, {"id": ID}]
    assert not script.data("backup.finish")


def served(phase: OperationPhase = OperationPhase.RUNNING, step: str = "serve") -> Any:
    return operation_view(id=ID, kind="serve", phase=phase, step=step, result=None)


AWAY = VirtbusError(Code.UNAVAILABLE, "no_leader", "the bus elects a leader")


async def test_an_outage_does_not_end_a_reading(script: Script, cli: Cli, tmp_path: Path) -> None:
    script.answer("backup", "serve", served())
    answers = iter([AWAY, served(), AWAY, served(OperationPhase.SUCCEEDED, "")])
    script.handlers["operation", "get"] = in_turn(answers)
    socket = tmp_path / "nbd.sock"
    more = ("--socket", str(socket), "-o", "json")
    ended = await cli("backup", "serve", "web", "--id", ID, *more)
    assert ended.code == 0, ended.err
    assert ended.json == {"id": ID, "socket": str(socket)}
    assert not script.data("operation.cancel")
    assert not socket.exists()


async def test_a_finish_is_repeated_while_nobody_answers(script: Script, cli: Cli) -> None:
    script.answer("backup", "serve", served())
    answers = iter([AWAY, served(OperationPhase.SUCCEEDED, "")])
    script.handlers["backup", "finish"] = in_turn(answers)
    ended = await cli("backup", "serve", "web", "--id", ID, "--", "true")
    assert ended.code == 0, ended.err
    assert not script.data("operation.cancel")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["stage", "serve"])
async def test_an_interrupt_cancels_the_reading(
    script: Script, step: str, sent: signal.Signals
) -> None:
    for resource, verb in (("backup", "serve"), ("operation", "get"), ("operation", "cancel")):
        script.answer(resource, verb, served(step=step))
    process = await start("backup", "serve", "web", "--id", ID, env=environment(script.files))
    while len(script.data("operation.get")) < 2:
        await asyncio.sleep(0.02)
    process.send_signal(sent)
    await process.communicate()
    assert script.data("operation.cancel") == [{"id": ID}]


def test_any_exception_cancels_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []
    invocation = Invocation("json", None, None)
    monkeypatch.setattr(invocation, "call", lambda *words: called.append(words[:2]))
    with pytest.raises(OSError, match="No space"), _cancelled_unless_done(invocation, ID):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert called == [("operation", "cancel")]


async def test_an_error_of_the_cancel_does_not_hide_the_first(script: Script, cli: Cli) -> None:
    taken = VirtbusError(Code.CONFLICT, "id_taken", "another operation has this id")
    script.answer("backup", "serve", taken)
    ended = await cli("backup", "serve", "web", "--id", ID)
    assert (ended.code, "another operation" in ended.err) == (1, True)
    assert not script.data("operation.cancel")
    script.answer("backup", "serve", served())
    gone = VirtbusError(Code.CONFLICT, "operation_ended", "the operation has ended")
    script.answer("operation", "cancel", gone)
    ended = await cli("backup", "serve", "web", "--id", ID, "--", "false")
    assert (ended.code, "the command ended with 1" in ended.err) == (1, True)


def in_turn(answers: Iterator[Any]) -> Handler:
    """Give each request the next answer, and raise errors."""

    async def handle(_: Request) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle
