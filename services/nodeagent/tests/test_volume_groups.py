"""Volume groups: only logical volumes of virtbus change, and each refusal has LVM's own reason."""

import asyncio
import errno
import json
import os
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.lvm2 import MIB, Lvm2, lvm2
from services.nodeagent.tests.lvm_program import OLD, THIN

from virtbus.bus.runtime.device_socket import LogicalAnswer, LogicalRequest, ask_logical
from virtbus.bus.runtime.pool_settings import load_pools
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.core.logical_volumes import lv_name
from virtbus.nodeagent.edge import lvm_commands, volume_groups
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.device_door import DeviceDoor
from virtbus.nodeagent.edge.lvm_commands import LvmCommands
from virtbus.nodeagent.edge.volume_groups import VolumeGroup, followed_groups
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.pool import PoolReport, PoolState

pytestmark = pytest.mark.integration

FOLDER = "default.data-1.0192f0c1-2d3e-7abc-8def-000000000077"
NAME = lv_name(f"fast/{FOLDER}")
TAGS = {"virtbus", f"virtbus.volume=fast/{FOLDER}"}
SIZE = 8 * MIB


@pytest.fixture
def vg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lvm2]:
    with lvm2(tmp_path / "lvm") as made:
        monkeypatch.setenv("PATH", f"{made.home}/bin:{os.environ['PATH']}")
        yield made


@pytest.fixture
def thin_vg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lvm2]:
    with lvm2(tmp_path / "lvm", thin_bytes=16 * MIB) as made:
        monkeypatch.setenv("PATH", f"{made.home}/bin:{os.environ['PATH']}")
        yield made


def of(vg: Lvm2, timeout_s: float = 20.0, **settings: object) -> VolumeGroup:
    return VolumeGroup("fast", vg.pool(**settings), LvmCommands(timeout_s), vg.devices)


async def do(group: VolumeGroup, what: str, size_bytes: int = 0, **more: Any) -> LogicalAnswer:
    """Do a request, and close the device that it opens."""
    fields = {"pool": "fast", "volume": FOLDER, "do": what, "size_bytes": size_bytes, **more}
    answer, device = await group.do(LogicalRequest.model_validate(fields))
    if device is not None:
        assert stat.S_ISBLK(os.fstat(device).st_mode)
        assert os.lseek(device, 0, os.SEEK_END) == answer.size_bytes
        os.close(device)
    return answer


# --- the life of a volume -------------------------------------------------------------------
async def test_a_volume_is_made_grown_marked_and_removed_by_these_commands(vg: Lvm2) -> None:
    group, path = of(vg), f"{vg.group}/{NAME}"
    assert await do(group, "open") == LogicalAnswer()
    assert (await do(group, "make", SIZE + 1)).size_bytes == 12 * MIB, "whole extents"
    assert vg.tags() == {NAME: TAGS}
    assert (await do(group, "mark", 12 * MIB, operation="fill-1")).filled_bytes == 12 * MIB
    assert (await do(group, "grow", 16 * MIB)).size_bytes == 16 * MIB
    assert (await do(group, "open")).filled_bytes == 12 * MIB, "the new part is not complete"
    marked = await do(group, "mark", 16 * MIB, operation="fill-1")
    assert (marked.filled_bytes, marked.operation) == (16 * MIB, "fill-1")
    assert (await do(group, "list", volume="")).volumes == {FOLDER: 16 * MIB}
    for _ in range(2):  # each request may be repeated
        assert (await do(group, "mark", 16 * MIB, operation="fill-1")).filled_bytes == 16 * MIB
        assert (await do(group, "grow", 16 * MIB)).size_bytes == 16 * MIB
    for _ in range(2):
        assert not (await do(group, "unmark")).filled_bytes
    for _ in range(2):
        assert await do(group, "remove") == LogicalAnswer()
    assert vg.tags() == {}
    first, second = f"virtbus.filled={12 * MIB}/fill-1", f"virtbus.filled={16 * MIB}/fill-1"
    which = f'lv_name="{NAME}" && lv_tags="virtbus.volume=fast/{FOLDER}"'
    tagged = ["--addtag", "virtbus", "--addtag", f"virtbus.volume=fast/{FOLDER}"]
    fresh = ["--zero", "y", "--wipesignatures", "y", "--size", f"{SIZE + 512}b"]
    assert vg.commands() == [
        ["lvcreate", "--yes", "--name", NAME, *tagged, *fresh, vg.group],
        ["lvchange", "--addtag", first, path],
        ["lvextend", "--size", f"{16 * MIB}b", path],
        ["lvchange", "--addtag", second, "--deltag", first, path],
        ["lvchange", "--deltag", second, path],
        ["lvremove", "--yes", "--select", which, vg.group],
    ]


async def test_a_half_made_volume_is_made_again_and_a_complete_one_is_not(vg: Lvm2) -> None:
    group = of(vg)
    await do(group, "make", SIZE)
    device = Path(vg.devices) / vg.group / NAME
    device.write_bytes(b"half")
    await do(group, "make", SIZE)
    assert device.read_bytes()[: len(OLD)] == OLD
    assert [words[0] for words in vg.commands()] == ["lvcreate", "lvremove", "lvcreate"]
    await do(group, "mark", SIZE, operation="fill-1")
    with pytest.raises(ValueError, match="has its content"):
        await do(group, "make", SIZE)
    with pytest.raises(ValueError, match="has 8388608 bytes"):
        await do(group, "mark", SIZE + 1)


async def test_a_volume_that_the_host_has_not_activated_since_its_boot_is(vg: Lvm2) -> None:
    group = of(vg)
    await do(group, "make", SIZE)
    link = Path(vg.devices) / vg.group / NAME
    (vg.home / "off").symlink_to(link.readlink())
    link.rename(vg.home / "was")
    vg.fails("lvchange", "  Activation of it is not allowed.\n")
    with pytest.raises(OSError, match="lvchange: Activation of it is not allowed"):
        await do(group, "open")
    vg.works()
    (vg.home / "was").rename(link)
    assert (await do(group, "open")).size_bytes == SIZE
    activate = ["lvchange", "--activate", "y", f"{vg.group}/{NAME}"]
    assert vg.commands()[-1] == activate


# --- what is not ours -----------------------------------------------------------------------
async def test_a_logical_volume_without_our_tag_is_never_touched(vg: Lvm2) -> None:
    """Also one with the name that ours would have, and one with our tag at another name."""
    group = of(vg)
    vg.run("lvcreate", "--name", NAME, "--size", "8m", vg.group)
    vg.run("lvcreate", "--name", "swap", "--size", "8m", "--addtag", "virtbus", vg.group)
    before, begun = vg.tags(), len(vg.commands())
    for what in ("open", "make", "grow", "mark", "unmark", "remove"):
        with pytest.raises(ValueError, match="lacks the name or the tag"):
            await do(group, what, SIZE)
    vg.run("lvrename", vg.group, NAME, "other")
    vg.run("lvchange", "--addtag", "virtbus", "--addtag", max(TAGS), f"{vg.group}/other")
    before = vg.tags()
    begun = len(vg.commands())
    for what in ("open", "make", "grow", "mark", "unmark", "remove"):
        with pytest.raises(ValueError, match="lacks the name or the tag"):
            await do(group, what, SIZE)
    assert (vg.tags(), len(vg.commands())) == (before, begun)
    assert (await group.measured()).allocated_bytes == 16 * MIB, "others need room, too"


async def test_lvm_itself_compares_the_tag_when_it_removes(vg: Lvm2) -> None:
    """An operator who takes the tag away between the look and the command keeps the data."""
    group = of(vg)
    await do(group, "make", SIZE)
    said = vg.run("lvs", "--reportformat", "json", "--units", "b", "--nosuffix", "-o",
                  "lv_name,lv_size,lv_tags,pool_lv,data_percent", vg.group)  # fmt: skip
    vg.run("lvchange", "--deltag", f"virtbus.volume=fast/{FOLDER}", f"{vg.group}/{NAME}")
    vg.fails("lvs", said=said)
    with pytest.raises(OSError, match="LVM has not removed"):
        await do(group, "remove")
    vg.works()
    assert vg.tags() == {NAME: {"virtbus"}}


# --- failures -------------------------------------------------------------------------------
FULL = '  Volume group "vg0" has insufficient free space (46 extents): 2560 required.\n'
GONE = '  Volume group "vg0" not found\n  Cannot process volume group vg0\n'
BUSY = "  Logical volume vg0/virtbus-1 in use.\n"
NOTED = "  WARNING: This metadata update is NOT backed up.\n"


@pytest.mark.parametrize(
    ("command", "why", "what", "reason"),
    [
        ("lvs", GONE, "open", 'lvs: Volume group "vg0" not found; Cannot process volume group vg0'),
        ("vgs", GONE, "make", 'vgs: Volume group "vg0" not found'),
        ("lvcreate", NOTED + FULL, "make", r'lvcreate: Volume group "vg0" has insufficient free'),
        ("lvremove", BUSY, "remove", "lvremove: Logical volume vg0/virtbus-1 in use."),
        ("lvextend", FULL, "grow", "lvextend: Volume group"),
        ("lvchange", "\n", "mark", "lvchange: status 5"),
    ],
)
async def test_a_refusal_has_the_reason_of_lvm(
    vg: Lvm2, command: str, why: str, what: str, reason: str
) -> None:
    group = of(vg)
    if what != "make":
        await do(group, "make", SIZE)
    vg.fails(command, why)
    with pytest.raises(OSError, match=f"^.Errno 0. {reason}"):
        await do(group, what, SIZE * (2 if what == "grow" else 1))
    vg.works()
    assert set(vg.tags()) == ({NAME} if what != "make" else set())
    await do(group, what, SIZE)


GARBAGE = [
    "",
    "{",
    "[" * 100_000,
    "7",
    '{"report": []}',
    '{"report": [{"lv": [{"lv_name": "a"}]}]}',
    '{"report": [{"lv": [{"lv_name": "a", "lv_size": "1.00g", "lv_tags": "", "pool_lv": "",'
    ' "data_percent": ""}]}]}',
]


async def test_a_report_that_makes_no_sense_is_refused(vg: Lvm2) -> None:
    for said in GARBAGE:
        group = of(vg)
        vg.fails("lvs", said=said)
        for what in ("open", "make", "remove", "list"):
            with pytest.raises(ValueError, match="the report of LVM cannot be read"):
                await do(group, what, SIZE)
        found = await group.measured()
        assert (found.state, "cannot be read" in found.message) == (PoolState.GONE, True)
    assert vg.commands() == []


async def test_a_volume_that_somebody_has_open_stays(vg: Lvm2) -> None:
    group = of(vg)
    await do(group, "make", SIZE)
    held = os.open(Path(vg.devices) / vg.group / NAME, os.O_RDONLY | os.O_EXCL)
    with pytest.raises(OSError, match=r"in use"):
        await do(group, "remove")
    os.close(held)
    assert await do(group, "remove") == LogicalAnswer()


async def test_a_command_that_hangs_is_ended_and_the_next_requests_do_not_wait(vg: Lvm2) -> None:
    group = of(vg, timeout_s=0.5)
    vg.fails("lvs", hangs_s=60)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def refused() -> str:
        with pytest.raises(OSError, match=r"^.Errno 0. lvs does not answer in 0\.5 s$") as why:
            await do(group, "open")
        return str(why.value)

    async with asyncio.TaskGroup() as many:
        for _ in range(20):
            many.create_task(refused())
    assert loop.time() - begun_s < 5
    assert (await group.measured()).state is PoolState.GONE
    vg.works()
    with pytest.raises(OSError, match="does not answer"):
        await do(group, "open")  # until a report says that it answers again
    group = of(vg)
    assert (await group.measured()).state is PoolState.READY
    assert await do(group, "open") == LogicalAnswer()


async def test_no_second_command_waits_beside_one_that_cannot_be_ended(
    vg: Lvm2, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stays(_process: object) -> None:
        """Leave it, as the kernel does with a process that waits for a device."""

    monkeypatch.setattr(lvm_commands, "_end", stays)
    commands = LvmCommands(0.3)
    vg.fails("vgs", hangs_s=60)
    with pytest.raises(TimeoutError):
        await commands.run(["vgs"])
    with pytest.raises(OSError, match="an earlier command of LVM hangs") as refused:
        await commands.run(["vgs"])
    found = re.search(r"process (\d+)", str(refused.value))
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    vg.works()
    async with asyncio.timeout(10):
        while True:
            try:
                await LvmCommands.run(commands, ["version"])
                break
            except OSError:
                await asyncio.sleep(0.05)


async def test_without_the_program_the_pool_is_gone(
    vg: Lvm2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lvm_commands, "PROGRAM", "no-such-program")
    found = await of(vg).measured()
    assert (found.state, found.message) == (PoolState.GONE, "No such file or directory")


# --- room -----------------------------------------------------------------------------------
async def test_a_group_promises_no_more_than_it_has(vg: Lvm2) -> None:
    group = of(vg, reserve=64 * MIB)
    empty = await group.measured()
    assert (empty.state, empty.size_bytes, empty.free_bytes) == (
        PoolState.READY, 252 * MIB, 252 * MIB,
    )  # fmt: skip
    for size_bytes, why in ((200 * MIB, "keeps 64MiB"), (300 * MIB, "may promise")):
        with pytest.raises(OSError, match=why) as refused:
            await do(group, "make", size_bytes)
        assert refused.value.errno == errno.ENOSPC
    await do(group, "make", 100 * MIB)
    with pytest.raises(OSError, match="the pool fast has") as refused:
        await do(group, "grow", 200 * MIB)
    assert refused.value.errno == errno.ENOSPC
    await do(group, "grow", 188 * MIB)
    full = await group.measured()
    assert (full.state, full.volumes, full.free_bytes) == (PoolState.FULL, 1, 64 * MIB)
    assert "(reserve); delete volumes, or enlarge the group" in full.message


async def test_a_thin_pool_promises_more_than_it_has(thin_vg: Lvm2) -> None:
    group = of(thin_vg, thin_pool=THIN, overcommit=4)
    assert (await do(group, "make", 40 * MIB)).thin
    found = await group.measured()
    assert (found.size_bytes, found.free_bytes, found.allocated_bytes, found.volumes) == (
        16 * MIB, 12 * MIB, 40 * MIB, 1,
    )  # fmt: skip
    with pytest.raises(OSError, match=r"overcommit.*do not fit"):
        await do(group, "grow", 70 * MIB)
    assert (await do(group, "grow", 44 * MIB)).size_bytes == 44 * MIB
    created = thin_vg.commands()[0]
    assert created[-5:] == ["--virtualsize", f"{40 * MIB}b", "--thinpool", THIN, thin_vg.group]
    missing = await of(thin_vg, thin_pool="none").measured()
    assert (missing.state, "has no thin pool none" in missing.message) == (PoolState.GONE, True)
    assert (await of(thin_vg, thin_pool=THIN, reserve=12 * MIB).measured()).state is PoolState.FULL


async def test_the_pools_are_reported(vg: Lvm2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_groups, "REPORT_S", 0.05)
    told: dict[str, PoolReport] = {}
    pools = {"fast": vg.pool(), "gone": vg.pool().model_copy(update={"group": "none"})}
    async with asyncio.TaskGroup() as tasks:
        groups = followed_groups(
            tasks, pools, lambda source, found: told.update({source: next(iter(found))})
        )
        async with asyncio.timeout(20):
            while len(told) < 2:
                await asyncio.sleep(0.01)
        for task in tasks._tasks:
            task.cancel()
    assert list(groups) == ["fast", "gone"]
    assert told["group fast"].state is PoolState.READY
    assert 'Volume group "none" not found' in told["group gone"].message


# --- the door -------------------------------------------------------------------------------
@pytest.fixture
async def door(tmp_path: Path, vg: Lvm2) -> AsyncIterator[Path]:
    path = tmp_path / "devices.sock"
    (tmp_path / "disks").mkdir()
    served = DeviceDoor(path, tmp_path / "disks", {}, groups={"fast": of(vg)})
    async with background() as tasks:
        tasks.start(served.serve())
        while not path.exists():
            await asyncio.sleep(0.01)
        yield path


async def test_imaged_gets_the_device_and_the_reason_of_a_refusal(door: Path, vg: Lvm2) -> None:
    async def ask(what: str, size_bytes: int = 0, pool: str = "fast") -> int | None:
        fields = {"pool": pool, "volume": FOLDER, "do": what, "size_bytes": size_bytes}
        request = LogicalRequest.model_validate(fields)
        return (await in_thread(partial(ask_logical, door, request)))[1]

    assert await ask("open") is None
    device = await ask("make", SIZE)
    assert device is not None
    assert (os.lseek(device, 0, os.SEEK_END), os.get_inheritable(device)) == (SIZE, False)
    os.close(device)
    with pytest.raises(OSError, match="no pool other of the kind lvm"):
        await ask("open", pool="other")
    with pytest.raises(OSError, match="may promise") as full:
        await ask("grow", 900 * MIB)
    assert full.value.errno == errno.ENOSPC
    vg.fails("lvremove", BUSY)
    with pytest.raises(OSError, match="in use"):
        await ask("remove")


HOSTILE: dict[str, list[object]] = {
    "volume": [
        "",
        "a",
        "../a.b." + FOLDER[-36:],
        "a;b.c." + FOLDER[-36:],
        "--all",
        'x" || lv_name=~".',
        "a.b." + "0" * 35,
        "A.b." + FOLDER[-36:],
        FOLDER + "\n",
        FOLDER * 20,
        7,
        None,
    ],
    "pool": ["", "..", "-f", "Fast", "fast\n", None, {}],
    "do": ["", "lvremove", "vgremove", None],
    "size_bytes": [-1, 2**63, "1g", None, []],
    "operation": ["a/b", "a,b", "a b", "-" * 65, None],
    "more": [1],
}


async def test_a_hostile_request_runs_no_command_that_changes_something(
    door: Path, vg: Lvm2
) -> None:
    plain = {"pool": "fast", "volume": FOLDER, "do": "make", "size_bytes": SIZE}

    def ask(request: dict[str, object]) -> str:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(10)
            asking.connect(str(door))
            asking.sendall(json.dumps(request).encode())
            return asking.recv(1024).decode()

    for field, values in HOSTILE.items():
        for value in values:
            why = await in_thread(partial(ask, plain | {field: value}))
            assert re.match(rf"-.*({field}|needs a volume|Unterminated)", why), (value, why)
    assert vg.commands() == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [("group", one) for one in ("", "-f", "..", "vg/0", "vg 0", "vg;0", "v" * 101, None)]
    + [("thin_pool", one) for one in ("", "--yes", "a/b", "$(id)")]
    + [("overcommit", -1), ("reserve", "-1GiB"), ("volumes", {})],
)
def test_hostile_settings_are_refused_by_their_path(
    tmp_path: Path, setting: str, value: object
) -> None:
    shown = {"group": '"vg0"', setting: "{}" if value == {} else f'"{value}"'}
    if value is None:
        del shown[setting]
    lines = "\n".join(f"{name} = {text}" for name, text in shown.items())
    (tmp_path / "pools.toml").write_text(f'[pools.fast]\nkind = "lvm"\n{lines}\n')
    with pytest.raises(VirtbusError) as refused:
        load_pools(tmp_path / "pools.toml")
    (problem,) = refused.value.body.details
    assert problem.path.startswith("pools.fast")
    assert problem.path.endswith(setting)
