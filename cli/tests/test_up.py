"""`virtbus up`: one per directory; it restarts its children and ends them, the bus last."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from cli.tests.fakes import environment, run, start

from virtbus.cli.failures import CliError
from virtbus.cli.up import banner, child
from virtbus.cli.up.bus_keeper import BusKeeper
from virtbus.cli.up.plan import BUS_ONLY, Place, choose, rest_s
from virtbus.cli.up.plan import environment as service_environment
from virtbus.cli.up.terminal import Terminal

PLACE = Place(Path("/s"), Path("/r"), "n1", simulate=False)


def test_dead_services_rest_longer_each_time_up_to_30_s() -> None:
    assert [rest_s(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("answer", "count"),
    [({"node": {"node": "n1", "vms": 3}, "vms": []}, 3), ({"items": []}, None), (None, None)],
)
async def test_the_vms_of_this_node_are_counted_or_unknown(answer: Any, count: int | None) -> None:
    admin = AsyncMock()
    admin.request.return_value = answer
    keeper = BusKeeper(Mock(), admin, PLACE, Terminal("INFO"))
    assert await keeper.vms_here() == count
    assert admin.request.call_args.args == ("virtbus.api.v1.node.get", {"node": "n1"})


async def test_a_service_that_is_being_started_is_killed_if_it_does_not_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = asyncio.create_subprocess_exec
    starting = asyncio.Event()
    made: list[asyncio.subprocess.Process] = []

    async def slow(*_: object, **__: object) -> asyncio.subprocess.Process:
        starting.set()
        await asyncio.sleep(0.1)
        made.append(await real("sleep", "100", stdout=asyncio.subprocess.PIPE))
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    monkeypatch.setattr(child, "STOP_S", 0.1)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process inherits it
    try:
        one = child.Child(PLACE, "netd", Terminal("INFO"), {}, parent_fd=0)
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(one.run())
            await starting.wait()
            await one.stop()
    finally:
        signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError, IndexError):
            made[0].kill()
    assert made[0].returncode == -signal.SIGKILL


def test_services_get_their_own_credentials_and_not_the_users() -> None:
    inherited = {"PATH": "/bin", "VIRTBUS_SERVER": "x", "VIRTBUS_CREDS": "y", "VIRTBUS_X": "z"}
    env = service_environment(PLACE, "netd", parent_fd=7, notify="@a", inherited=inherited)
    assert env["VIRTBUS_CREDS"] == "/r/netd-n1.creds"
    assert "VIRTBUS_SERVER" not in env
    assert (env["VIRTBUS_PARENT_FD"], env["NOTIFY_SOCKET"], env["VIRTBUS_X"]) == ("7", "@a", "z")


def test_simulation_runs_the_simulator_with_the_credentials_of_the_agent() -> None:
    place = Place(Path("/s"), Path("/r"), "n1", simulate=True)
    assert place.services == ("controller", "simulator")
    env = service_environment(place, "simulator", parent_fd=7, notify="@a", inherited={})
    assert env["VIRTBUS_CREDS"] == "/r/node-n1.creds"


def test_two_state_folders_on_one_host_have_a_wrapper_each() -> None:
    netd = service_environment(PLACE, "netd", parent_fd=7, notify="@a", inherited={})
    agent = service_environment(PLACE, "nodeagent", parent_fd=7, notify="@a", inherited={})
    assert netd["VIRTBUS_WRAPPER_DIR"] == "/s/libexec"
    assert agent["VIRTBUS_WRAPPER"] == "/s/libexec/vmwrapper"
    assert "VIRTBUS_WRAPPER" not in netd
    usual = Place(Path("/var/lib/virtbus"), Path("/run/virtbus"), "n1", simulate=False)
    env = service_environment(usual, "netd", parent_fd=7, notify="@a", inherited={})
    assert "VIRTBUS_WRAPPER_DIR" not in env


def test_directories_come_from_flags_then_data_then_environment() -> None:
    env = {"VIRTBUS_STATE_DIR": "/e/s", "VIRTBUS_RUN_DIR": "/e/r"}
    assert choose(data=None, state_dir=None, run_dir="/f", environ=env) == (
        Path("/e/s"),
        Path("/f"),
    )
    found = choose(data="/d", state_dir=None, run_dir=None, environ=env)
    assert found == (Path("/d/state"), Path("/d/run"))
    with pytest.raises(CliError):
        choose(data="/d", state_dir="/x", run_dir=None, environ=env)


def test_a_simulation_uses_other_folders_than_a_real_node() -> None:
    def chosen(state_dir: str | None = None, **environ: str) -> tuple[Path, Path]:
        env = {"XDG_STATE_HOME": "/home/state", **environ}
        return choose(data=None, state_dir=state_dir, run_dir=None, environ=env, simulate=True)

    apart = Path("/home/state/virtbus-simulate")
    assert chosen() == (apart / "state", apart / "run")
    assert chosen(VIRTBUS_STATE_DIR="/e") == (Path("/e"), apart / "run")
    assert chosen("/s", VIRTBUS_RUN_DIR="/r") == (Path("/s"), Path("/r"))


def test_the_folder_of_a_clusters_image_names_exists_where_imaged_runs() -> None:
    assert PLACE.folders == (Path("/s"), Path("/r"), Path("/r/image-names"))
    assert replace(PLACE, runs=BUS_ONLY).folders == (Path("/s"), Path("/r"))


def test_banner_has_a_ready_nats_line_and_names_missing_guarantees() -> None:
    creds = {"url": "nats://127.0.0.1:4222", "user": "client", "password": "p"}
    text = "\n".join(banner.lines(PLACE, creds, Path("/r/nats.log")))
    assert (
        "nats --server nats://client:p@127.0.0.1:4222 req virtbus.api.v1.vm.create"
        ' \'{"name": "web", "image": "tiny"}\''
    ) in text
    assert "Not highly available: one NATS server" in text
    assert "export VIRTBUS_CREDS=/r/bus.creds" in text


def test_banner_fits_the_terminal_and_leaves_wider_lines_unboxed() -> None:
    wide = "  nats --server " + "x" * 100
    text = banner.box(["a", wide, "bb"], drawn=True, columns=40)
    assert wide in text.splitlines()
    assert all(len(line) <= 40 for line in text.splitlines() if line != wide)


def test_terminal_relays_records_with_service_level_and_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal("INFO")
    terminal.relay(
        "netd", '{"ts":"2026-01-02T03:04:05.678+00:00","level":"ERROR","message":"m\\n"}'
    )
    terminal.relay(
        "netd", '{"level":"ERROR","message":"x","exception":"Trace\\n  a\\nKeyError: 1"}'
    )
    terminal.relay("netd", "no record \x1b[2J")
    terminal.say("quiet", "DEBUG")
    first, _, cause, last = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["03:04:05.678", "netd", "ERROR"]
    assert cause.endswith("KeyError: 1")
    assert "\x1b" not in last


# --- real server --------------------------------------------------------------------------


@asynccontextmanager
async def up(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `virtbus up --simulate` until it prints its usage; end it in any case."""
    arguments = ("up", "--simulate", "--data", str(tmp_path), "--port", "-1", "--node", "n1")
    process = await start(*arguments, env=environment(), stderr=asyncio.subprocess.STDOUT)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            while b"Ctrl-C stops" not in await process.stdout.readline():
                assert process.returncode is None
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()
        end_all_of(tmp_path)


def end_all_of(tmp_path: Path) -> None:
    """End a failed test's remains: every process whose environment or command names its folder."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if int(entry.name) != os.getpid() and bytes(tmp_path / "run") in words:
                os.kill(int(entry.name), signal.SIGKILL)


def children(pid: int) -> dict[int, str]:
    """Return the processes below `pid`, by their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


async def until_gone(pids: set[int]) -> None:
    async with asyncio.timeout(15):
        while any(_alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_service(pid: int, name: str) -> int:
    async with asyncio.timeout(15):
        while True:
            for child, line in children(pid).items():
                if f"virtbus.{name}" in line:
                    return child
            await asyncio.sleep(0.02)


@pytest.mark.integration
async def test_sigterm_stops_everything_and_keeps_the_data(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        await until_service(process.pid, "simulator")
        below = set(children(process.pid))
        process.terminate()
        out, _ = await process.communicate()
    text = out.decode()
    assert process.returncode == 0, text
    await until_gone(below)
    assert text.index("stopping (SIGTERM)") < text.index("stopped")
    assert (tmp_path / "state" / "nats").is_dir()


@pytest.mark.integration
async def test_simulated_vm_is_created_followed_and_deleted(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        env = environment() | {"VIRTBUS_CREDS": str(tmp_path / "run" / "bus.creds")}
        created = await run(
            *("vm", "create", "web", "--image", "tiny", "--wait", "running", "-o", "json"), env=env
        )
        assert created.code == 0, created.err
        assert created.json["state"] == "Running"
        assert (await run("status", env=env)).code == 0
        traced = await run("vm", "trace", "web", env=env)
        assert traced.out.splitlines()[2].startswith("vm create"), traced.err
        images = await run("image", "list", "-o", "json", env=env)
        assert [image["names"] for image in images.json["items"]] == [["tiny"]]
        gone = await run("vm", "delete", "web", "--grace", "0", env=env)
        assert (gone.code, gone.out) == (0, "web deleted\n"), gone.err
        assert (await run("image", "delete", "tiny", env=env)).code == 0
        assert process.returncode is None


@pytest.mark.integration
async def test_second_instance_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        second = await run("up", "--simulate", "--data", str(tmp_path), env=environment())
        assert second.code == 1
        assert f"already runs on {tmp_path / 'state'} (process {process.pid})" in second.err


async def test_the_state_of_the_first_version_is_refused_untouched(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "VERSION").write_text("1\n")
    refused = await run("up", "--simulate", "--data", str(tmp_path), env=environment())
    assert refused.code == 1
    assert "docs/howto/upgrade-from-0.1.md" in refused.err
    assert [path.name for path in state.iterdir()] == ["VERSION"]


@pytest.mark.integration
async def test_a_killed_service_is_restarted_with_a_message(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        assert process.stdout is not None
        first = await until_service(process.pid, "simulator")
        os.kill(first, signal.SIGKILL)
        while b"simulator ended (" not in await process.stdout.readline():
            pass
        async with asyncio.timeout(15):
            while await until_service(process.pid, "simulator") == first:
                await asyncio.sleep(0.02)


@pytest.mark.integration
async def test_services_end_when_up_is_killed_and_the_next_up_takes_over(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        await until_service(process.pid, "simulator")
        below = {pid for pid, line in children(process.pid).items() if "virtbus." in line}
        process.kill()
        await process.communicate()
    await until_gone(below)
    async with up(tmp_path) as process:
        assert process.returncode is None


@pytest.mark.integration
async def test_killed_bus_is_started_again_on_its_port(tmp_path: Path) -> None:
    async with up(tmp_path) as process:
        assert process.stdout is not None
        creds = (tmp_path / "run" / "bus.creds").read_text()
        os.kill(int((tmp_path / "run" / "nats-server.pid").read_text()), signal.SIGKILL)
        while b"it is declared again" not in await process.stdout.readline():
            assert process.returncode is None
        assert (tmp_path / "run" / "bus.creds").read_text() == creds
