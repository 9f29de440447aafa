"""The agent's files are complete or missing, after a crash at any point."""

import asyncio
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtbus.nodeagent.edge.atomic_file import replace
from virtbus.nodeagent.edge.ledger import REMOVED_KEPT_S, EpochLedger, read_entries
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.vm import VmRecord, VmSpec


def uid(number: int) -> str:
    return f"0192f0c1-2d3e-7abc-8def-{number:012x}"


def record(number: int, epoch: int = 1) -> VmRecord:
    return VmRecord(
        uid=uid(number),
        namespace="default",
        name=f"vm{number}",
        spec=VmSpec(),
        spec_hash="0" * 64,
        node="n1",
        epoch=epoch,
        created_ns=1,
    )


def opened(path: Path) -> AgentFiles:
    files = AgentFiles(path / "state", path / "run")
    files.open("n1")
    return files


async def test_written_data_survives_a_restart(tmp_path: Path) -> None:
    files = opened(tmp_path)
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(files.write(record(number, epoch=number + 1)))
    files.close()
    again = opened(tmp_path)
    assert await again.list() == {uid(n): record(n, epoch=n + 1) for n in range(50)}
    assert [again.epoch(uid(n)) for n in range(50)] == list(range(1, 51))
    again.close()


async def test_an_epoch_never_goes_back_and_outlives_its_record(tmp_path: Path) -> None:
    files = opened(tmp_path)
    await files.write(record(1, epoch=7))
    await files.write(record(1, epoch=5))
    assert files.epoch(uid(1)) == 7
    await files.forget(uid(1))
    assert await files.list() == {}
    files.close()
    again = opened(tmp_path)
    assert again.epoch(uid(1)) == 7
    again.close()


async def test_removing_a_vms_work_keeps_only_its_record(tmp_path: Path) -> None:
    files = opened(tmp_path)
    await files.write(record(1))
    (files.vms / uid(1) / "seed-a.iso").touch()
    files.console_socket(uid(1)).touch()
    for suffix in ("", ".0"):
        Path(f"{files.console_log(uid(1))}{suffix}").touch()
    await files.remove_work(uid(1))
    await files.remove_work(uid(1))
    left = {p.name for p in tmp_path.rglob("*") if uid(1) in str(p) and p.is_file()}
    assert left == {"record"}
    await files.forget(uid(1))
    await files.forget(uid(1))
    assert not [p for p in tmp_path.rglob("*") if uid(1) in str(p)]
    files.close()


async def test_a_quarantined_vm_keeps_no_name_of_a_volume(tmp_path: Path) -> None:
    files = opened(tmp_path)
    await files.write(record(1))
    names = ("disk-data.qcow2", f"layer-data.{uid(7)}.qcow2", f"layer-root.{uid(7)}.qcow2")
    for name in names:
        (tmp_path / name).touch()
        (files.vms / uid(1) / name).hardlink_to(tmp_path / name)
    (tmp_path / names[2]).unlink()  # the data has no other name
    await files.keep_work(uid(1), uid(1))
    assert [(tmp_path / name).stat().st_nlink for name in names[:2]] == [1, 1]
    kept = {path.name for path in (tmp_path / "state" / "quarantine" / uid(1)).iterdir()}
    assert kept == {"record", names[2]}
    files.close()


async def test_a_second_agent_on_the_same_state_is_refused(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with pytest.raises(VirtbusError) as raised:
        opened(tmp_path)
    assert raised.value.reason == "second_agent"
    files.close()
    opened(tmp_path).close()


async def test_an_imaged_of_its_own_user_can_read_the_version(tmp_path: Path) -> None:
    version = tmp_path / "state" / "VERSION"
    opened(tmp_path).close()
    assert version.stat().st_mode & 0o777 == 0o644
    version.chmod(0o600)  # an agent of an earlier commit wrote it
    opened(tmp_path).close()
    assert version.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("version", [str(SCHEMA_VERSION + 1), "99", "x"])
async def test_state_of_a_newer_program_is_refused_with_the_next_step(
    tmp_path: Path, version: str
) -> None:
    opened(tmp_path).close()
    (tmp_path / "state" / "VERSION").write_text(version)
    with pytest.raises(VirtbusError) as raised:
        opened(tmp_path)
    assert raised.value.reason == "state_newer"
    assert "install" in str(raised.value)


async def test_state_of_the_first_version_is_refused_untouched_with_the_next_step(
    tmp_path: Path,
) -> None:
    opened(tmp_path).close()
    (tmp_path / "state" / "VERSION").write_text("1")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(VirtbusError, match=r"upgrade-from-0\.1") as raised:
        opened(tmp_path)
    assert raised.value.reason == "state_older"
    assert sorted(tmp_path.rglob("*")) == before


async def test_a_broken_or_foreign_record_is_left_out(tmp_path: Path) -> None:
    files = opened(tmp_path)
    await files.write(record(1))
    for name, data in (("record", b"\x00torn"), (".record.9-9.part", b"half")):
        (files.vms / uid(2)).mkdir(exist_ok=True)
        (files.vms / uid(2) / name).write_bytes(data)
    (files.vms / uid(3)).mkdir()
    (files.vms / uid(3) / "record").write_bytes((files.vms / uid(1) / "record").read_bytes())
    assert set(await files.list()) == {uid(1)}
    files.close()
    opened(tmp_path).close()
    assert not list(tmp_path.rglob("*.part"))


async def test_only_root_reads_a_record(tmp_path: Path) -> None:
    files = opened(tmp_path)
    await files.write(record(1))
    files.set_nonce("n")
    for path in (files.vms / uid(1) / "record", tmp_path / "state" / "agent" / "nonce"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files.nonce() == "n"
    files.close()


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text(f"{uid(1)} 3 0 .\n{uid(1)} 4 0 .\n{uid(2)} 12 17")
    ledger = EpochLedger(path)
    ledger.open()
    ledger.acted(uid(3), 9)
    ledger.save(uid(3))
    ledger.close()
    entries = read_entries(path.read_text())
    assert {u: e.epoch for u, e in entries.items()} == {uid(1): 4, uid(3): 9}


def test_a_clock_a_day_ahead_at_the_start_forgets_no_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, removed_s = tmp_path / "ledger", 1_790_000_000
    ledger = EpochLedger(path)
    ledger.open()
    ledger.seen(removed_s * 1_000_000_000)
    ledger.acted(uid(1), 3)
    ledger.removed(uid(1))
    ledger.save(uid(1))
    ledger.close()
    for ahead_s in (2 * REMOVED_KEPT_S, 10 * 365 * REMOVED_KEPT_S):
        monkeypatch.setattr(time, "time", lambda s=ahead_s: float(removed_s + s))
        again = EpochLedger(path)
        again.open()
        assert again.left(uid(1)) == 3
        again.close()


def test_a_fence_expires_after_a_day_of_the_buss_time(tmp_path: Path) -> None:
    path, removed_s = tmp_path / "ledger", 1_790_000_000
    ledger = EpochLedger(path)
    ledger.open()
    for number, at_s in ((1, removed_s), (2, removed_s + REMOVED_KEPT_S + 1)):
        ledger.seen(at_s * 1_000_000_000)
        ledger.acted(uid(number), 3)
        ledger.removed(uid(number))
        ledger.save(uid(number))
    ledger.close()
    again = EpochLedger(path)
    again.open()
    assert (again.left(uid(1)), again.left(uid(2))) == (0, 3)
    again.close()


def test_a_removed_vm_is_forgotten_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text(f"{uid(1)} 3 1000 .\n{uid(2)} 3 {2**33} .\n")
    ledger = EpochLedger(path)
    ledger.open()
    assert (ledger.epoch(uid(1)), ledger.epoch(uid(2))) == (0, 3)
    assert REMOVED_KEPT_S == 24 * 3600
    ledger.close()


@given(st.text(max_size=300))
def test_no_text_breaks_the_reading_of_a_ledger(text: str) -> None:
    for name, entry in read_entries(text).items():
        assert len(name) == 36
        assert entry.epoch >= 0


async def test_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + n]) * 100_000 for n in range(20)]
    async with asyncio.TaskGroup() as group:
        for data in contents:
            group.create_task(asyncio.to_thread(replace, path, data))
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_state_of_another_node_is_refused(tmp_path: Path) -> None:
    first = AgentFiles(tmp_path / "state", tmp_path / "run")
    first.open("n1")
    first.close()
    with pytest.raises(VirtbusError) as refused:
        AgentFiles(tmp_path / "state", tmp_path / "run").open("n2")
    assert refused.value.reason == "other_node"
    assert "--node n1" in str(refused.value)


async def test_a_record_cut_at_any_byte_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for number in (1, 2):
        await files.write(record(number))
    path = files.vms / uid(1) / "record"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert set(await files.list()) == {uid(2)}, length
    await files.write(record(1))
    assert await files.list() == {uid(1): record(1), uid(2): record(2)}
    files.close()


def test_a_ledger_cut_at_any_byte_keeps_the_lines_before_and_takes_more(tmp_path: Path) -> None:
    lines = [f"{uid(number)} {number + 10} 0 .\n" for number in range(1, 5)]
    whole = "".join(lines)
    path = tmp_path / "ledger"
    for length in range(len(whole) + 1):
        path.write_text(whole[:length])
        ledger = EpochLedger(path)
        ledger.open()
        ledger.acted(uid(9), 7)
        ledger.save(uid(9))
        ledger.close()
        found = {u: e.epoch for u, e in read_entries(path.read_text()).items()}
        kept = (length + 1) // len(lines[0])  # a line without its newline is complete
        assert found == {uid(9): 7} | {uid(n): n + 10 for n in range(1, kept + 1)}, length


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_truncated_nonce_is_another_bus_and_deletes_nothing(tmp_path: Path, cut: int) -> None:
    files = opened(tmp_path)
    files.set_nonce("0123456789")
    path = tmp_path / "state" / "agent" / "nonce"
    path.write_bytes(path.read_bytes()[:cut])
    assert files.nonce() != "0123456789"
    files.close()
