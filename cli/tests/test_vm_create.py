"""`vm create` against scripted services on a real nats-server."""

import asyncio
import json
from typing import Any

import pytest
from cli.tests.fakes import READY, UID, Cli, Script, environment, start, vm_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import VmCreate, VmCreated, WatchReply
from virtbus.schemas.envelope import open_envelope
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.events import EventKind, Span
from virtbus.schemas.ids import check_uid
from virtbus.schemas.image import Progress
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import progress
from virtbus.schemas.volume_spec import Access

pytestmark = pytest.mark.integration

CREATE = ("vm", "create", "web", "--image", "tiny", "--uid", UID)


def accepted(**changes: Any) -> VmCreated:
    return VmCreated(vm=vm_view(**({"state": VmState.SCHEDULED} | changes)), created=True)


async def test_create_sends_a_command_that_the_schema_accepts(
    script: Script, cli: Cli, tmp_path: Any
) -> None:
    script.answer("vm", "create", accepted())
    key = tmp_path / "key.pub"
    key.write_text("# mine\nssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE me@here\n")
    data = tmp_path / "user-data"
    data.write_text("#cloud-config\n")
    ended = await cli(
        *("vm", "create", "web", "--image", "tiny", "--cpus", "2", "--memory", "512MiB"),
        *("--disk", "4GiB", "--ssh-key", str(key), "--user-data", str(data)),
        *("--network", "lan", "--label", "tier=front", "-n", "prod"),
    )
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    command = VmCreate.model_validate(sent)
    assert check_uid(str(command.uid))
    assert command.cpus == 2
    assert command.memory == 512 * 1024**2
    assert command.disk == 4 * 1024**3
    assert command.ssh_keys == ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE me@here",)
    assert command.user_data == "#cloud-config\n"
    assert (command.network, command.namespace) == ("lan", "prod")
    assert command.labels == {"tier": "front"}


async def test_new_volumes_are_templates_with_a_retention(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    wanted = ("--new-volume", "db=10GiB", "--new-volume", "root=2GiB:docker.io/debian:12")
    ended = await cli(*CREATE, "--volume", "data=logs", *wanted, "--delete-volumes")
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    VmCreate.model_validate(sent)
    held, db, root = sent["spec"]["volumes"]
    assert held == {"name": "logs", "volume": {"name": "data"}}
    empty = {"size": "10GiB", "retention": "Delete"}
    assert db == {"name": "db", "volume": {"name": "db", "template": empty}}
    of_image = {"size": "2GiB", "source": {"image": "docker.io/debian:12"}, "retention": "Delete"}
    assert root["volume"]["template"] == of_image


@pytest.mark.parametrize("access", list(Access))
async def test_new_volumes_have_an_access(script: Script, cli: Cli, access: Access) -> None:
    script.answer("vm", "create", accepted())
    ended = await cli(*CREATE, "--new-volume", "cluster=50GiB", "--access", str(access))
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    spec = VmCreate.model_validate(sent).spec
    assert spec is not None
    (disk,) = spec.volumes
    assert disk.volume is not None
    assert disk.volume.template is not None
    assert disk.volume.template.access is access


@pytest.mark.parametrize(
    "flags",
    [
        *(("--new-volume", "db"), ("--new-volume", "db=1GiB:")),
        *(("--delete-volumes",), ("--access", "shared")),
    ],
)
async def test_half_a_new_volume_is_refused(cli: Cli, flags: tuple[str, ...]) -> None:
    ended = await cli(*CREATE, *flags)
    assert (ended.code, "--new-volume" in ended.err) == (2, True)


async def test_published_ports_belong_to_the_first_interface(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    texts = "8080:80", "192.0.2.7:53:5353/udp", "[2001:db8::7]:53:5353/udp", "[::]:81:80"
    ports = [word for text in texts for word in ("--publish", text)]
    ended = await cli(*CREATE, "--network", "lan", *ports)
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    spec = VmCreate.model_validate(sent).spec
    assert spec is not None
    assert [(one.name, one.network) for one in spec.networks] == [("default", "lan")]
    (nic,) = spec.domain.devices.interfaces
    assert [text for port in nic.publish for text in port.shown((4, 6))] == [
        "0.0.0.0:8080->80/tcp",
        "[::]:8080->80/tcp",
        "192.0.2.7:53->5353/udp",
        "[2001:db8::7]:53->5353/udp",
        "0.0.0.0:81->80/tcp",
        "[::]:81->80/tcp",
    ]


async def test_static_addresses_belong_to_the_first_interface(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    flags = ("--network", "lab", "--address", "10.9.1.7", "--address", "fd00:9::7")
    ended = await cli(*CREATE, *flags)
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    spec = VmCreate.model_validate(sent).spec
    assert spec is not None
    assert [(one.name, one.network) for one in spec.networks] == [("default", "lab")]
    (nic,) = spec.domain.devices.interfaces
    assert (nic.addresses, nic.publish) == (("10.9.1.7", "fd00:9::7"), ())


@pytest.mark.parametrize("wrong", ["80", "a:80", "80:", "1.2.3.4:80", ":80/tcp"])
async def test_a_malformed_published_port_is_refused_without_a_request(
    script: Script, cli: Cli, wrong: str
) -> None:
    ended = await cli(*CREATE, "--publish", wrong)
    assert ended.code == 2
    assert "must be [ADDRESS:]HOST_PORT:GUEST_PORT" in ended.err
    assert script.data("vm.create") == []


async def test_file_from_stdin_is_sent_and_flags_override_it(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    text = "name: web\nimage: tiny\nmemory: 128MiB\nlabels: {a: b}\n"
    ended = await cli("vm", "create", "-f", "-", "--memory", "1GiB", "--label", "c=d", stdin=text)
    assert ended.code == 0, ended.err
    (sent,) = script.data("vm.create")
    assert (sent["name"], sent["memory"]) == ("web", "1GiB")
    assert sent["labels"] == {"a": "b", "c": "d"}


async def test_a_namespace_on_the_command_line_overrides_that_of_the_file(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "create", accepted())
    text = "name: web\nimage: tiny\nnamespace: shop\n"
    for words in (("-n", "default"), (), ("-n", "prod")):
        assert (await cli("vm", "create", "-f", "-", *words, stdin=text)).code == 0
    sent = [one["namespace"] for one in script.data("vm.create")]
    assert sent == ["default", "shop", "prod"]


async def test_wait_running_ends_when_the_watch_shows_running(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    await script.see(
        WatchReply(items=(vm_view(state=VmState.PREPARING),), renew="virtbus.api.v1.vm.renew.1"),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.STARTING)),
        WatchReply(change=vm_view()),
    )
    ended = await cli(*CREATE, "--wait", "running", "-o", "json")
    assert ended.code == 0, ended.err
    assert ended.json["state"] == "Running"
    assert ended.json["spec"]["domain"]["cpu"]["cores"] == 1  # defaults are not left out
    assert script.data("vm.watch") == [{"uid": UID}]


async def test_wait_ready_lasts_until_the_ready_condition(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True))
    await script.see(WatchReply(change=vm_view(conditions=(READY,))))
    ended = await cli(*CREATE, "--wait", "ready")
    assert ended.code == 0, ended.err
    assert "10.77.0.5" in ended.out


async def test_wait_that_runs_out_is_an_unknown_outcome(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True))
    late = await cli(*CREATE, "--wait", "ready", "--timeout", "0.5")
    assert late.code == 4
    assert "error: web is not ready after 500ms" in late.err


async def test_steps_and_progress_are_shown_while_waiting(script: Script, cli: Cli) -> None:
    async def create(_: Request) -> VmCreated:
        await script.happen(EventKind.VM_ACCEPTED)
        report = Progress(uid=UID, step="pull", done_bytes=50, total_bytes=100)
        await script.node.publish(progress("n1", UID, "pull"), report)
        await script.happen(EventKind.IMAGE_READY, took_ms=12.3, message="cached")
        await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True))
        return accepted()

    script.handlers["vm", "create"] = create
    ended = await cli(*CREATE, "--wait", "running")
    assert ended.code == 0, ended.err
    lines = ended.err.splitlines()
    assert any("vm.accepted" in line for line in lines)
    assert any("50 %" in line for line in lines)
    assert any("image.ready" in line and "cached (12 ms)" in line for line in lines)


async def test_json_output_keeps_stderr_silent_off_a_terminal(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True))
    ended = await cli(*CREATE, "--wait", "running", "-o", "json")
    assert (ended.code, ended.err) == (0, "")


async def test_a_failed_vm_shows_reason_and_next_step_and_exits_1(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    failed = vm_view(state=VmState.FAILED, reason="image_unknown", message="no image is named x")
    await script.see(WatchReply(items=(failed,)), WatchReply(synced=True))
    ended = await cli(*CREATE, "--wait", "running")
    assert ended.code == 1
    assert "error: web is Failed: no image is named x" in ended.err
    assert "virtbus vm events web" in ended.err


async def test_refusal_shows_every_field_and_exits_1(script: Script, cli: Cli) -> None:
    details = (
        Detail(path="cpus", message="must be at least 1"),
        Detail(path="memry", message="unknown field", hint="did you mean memory?"),
    )
    error = VirtbusError(Code.INVALID, "invalid", "cpus: must be at least 1", details=details)
    script.answer("vm", "create", error)
    ended = await cli(*CREATE)
    assert ended.code == 1
    assert "  memry: unknown field\n    hint: did you mean memory?" in ended.err
    as_json = await cli(*CREATE, "-o", "json")
    body = json.loads(as_json.err)["error"]
    assert (body["code"], body["reason"], body["exit_code"]) == (400, "invalid", 1)
    assert [detail["path"] for detail in body["details"]] == ["cpus", "memry"]


async def test_a_busy_controller_is_retried_with_the_same_id(script: Script, cli: Cli) -> None:
    ids: list[str] = []

    async def create(request: Request) -> VmCreated:
        ids.append(request.id)
        if len(ids) < 3:
            raise VirtbusError(Code.UNAVAILABLE, "busy", "try again", after_ms=10)
        return accepted()

    script.handlers["vm", "create"] = create
    ended = await cli(*CREATE)
    assert ended.code == 0, ended.err
    assert len(ids) == 3
    assert len(set(ids)) == 1


async def test_no_answer_in_time_is_an_unknown_outcome(script: Script, cli: Cli) -> None:
    async def create(_: Request) -> VmCreated:
        await asyncio.Event().wait()
        raise AssertionError

    script.handlers["vm", "create"] = create
    ended = await cli(*CREATE, "--timeout", "0.5")
    assert ended.code == 4
    assert "may or may not have happened" in ended.err


async def test_create_makes_the_trace_and_publishes_its_own_span(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", accepted())
    async with script.bus.subscribe("virtbus.report.client.span") as spans:
        ended = await cli(*CREATE)
        assert ended.code == 0, ended.err
        message = await anext(aiter(spans))
    span = Span.model_validate(open_envelope(message.body).data)
    (request,) = [r for subject, _, r in script.asked if subject.endswith("vm.create")]
    assert request.traceparent == f"00-{span.trace_id}-{span.span_id}-01"
    assert span.attributes["virtbus.uid"] == UID
    assert span.end_ns >= span.start_ns


async def test_a_lost_connection_during_the_wait_is_restored(script: Script) -> None:
    """A relay cuts the connection between the command and the server."""
    script.answer("vm", "create", accepted())
    env = environment(script.files)
    async with asyncio.TaskGroup() as group:
        relay = _Relay(json.loads(script.files.creds("client").read_text())["url"])
        await relay.open(group)
        env["VIRTBUS_SERVER"] = relay.url
        process = await start(*CREATE, "--wait", "running", "-o", "json", env=env)
        async with asyncio.timeout(10):
            while not script.data("vm.watch"):
                await asyncio.sleep(0.01)
            relay.cut()
            while len(script.data("vm.watch")) < 2:
                await asyncio.sleep(0.01)
        await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True))
        out, err = await process.communicate()
        relay.close()
    assert process.returncode == 0, err
    assert json.loads(out)["state"] == "Running"


class _Relay:
    """A TCP relay whose connections can be cut."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("nats://").rpartition(":")
        self._target = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.url = ""

    async def open(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        there_reader, there = await asyncio.open_connection(*self._target)
        self._writers.append(there)
        self._group.create_task(self._copy(reader, there))
        self._group.create_task(self._copy(there_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()


async def test_create_that_no_node_could_hold_is_refused_at_once_with_every_reason(
    script: Script, cli: Cli
) -> None:
    error = VirtbusError(
        Code.UNSUPPORTED,
        "no_capacity",
        "none of 1 node(s) could hold this VM",
        details=(Detail(path="node/n1", message="has no network named nonet"),),
    )
    script.answer("vm", "create", error)
    ended = await cli(*CREATE)
    assert ended.code == 1
    assert ended.err == (
        "error: none of 1 node(s) could hold this VM\n  node/n1: has no network named nonet\n"
    )
    assert len(script.data("vm.create")) == 1


WHY = "no node can take it now: n1 is draining"
WAITS = vm_view(state=VmState.PENDING, node="_", reason="unplaced", message=WHY)


async def test_a_create_that_waits_for_a_node_is_accepted_and_shows_the_reason(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "create", VmCreated(vm=WAITS, created=True))
    ended = await cli(*CREATE)
    assert ended.code == 0
    assert "Pending" in ended.out
    assert f"it is Pending: {WHY}\n" in ended.err


async def test_wait_shows_why_a_vm_has_no_node_once(script: Script, cli: Cli) -> None:
    script.answer("vm", "create", VmCreated(vm=WAITS, created=True))
    await script.see(
        WatchReply(items=(WAITS,), renew="virtbus.api.v1.vm.renew.1"),
        WatchReply(synced=True),
        WatchReply(change=WAITS),
        WatchReply(change=vm_view()),
    )
    ended = await cli(*CREATE, "--wait", "running")
    assert ended.code == 0, ended.err
    assert ended.err.count(WHY) == 1


async def test_refusal_that_lasts_until_the_end_is_shown_and_not_taken_for_absence(
    script: Script, cli: Cli
) -> None:
    error = VirtbusError(Code.UNAVAILABLE, "recovering", "the list is being read", after_ms=50)
    script.answer("vm", "create", error)
    ended = await cli(*CREATE, "--timeout", "1")
    assert (ended.code, ended.err) == (5, "error: the list is being read\n")


async def test_a_vm_deleted_during_the_wait_is_reported_as_deleted(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "create", accepted())
    deleting = vm_view(state=VmState.DELETING, deleting=True)
    await script.see(WatchReply(items=(deleting,)), WatchReply(synced=True))
    ended = await cli(*CREATE, "--wait", "ready")
    assert ended.code == 1
    assert "error: web was deleted meanwhile" in ended.err
