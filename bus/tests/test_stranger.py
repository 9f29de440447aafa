"""Stolen credentials: their rights are those of their role, and no more (ADR 0013)."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from bus.tests.strangers import UID, Stranger, every_subject, listening, sequences, stranger

from virtbus.bus.provisioning import server

pytestmark = pytest.mark.integration

OTHER = f"$KV.vm.n2.{UID}"

NODE_MAY_SAY = {
    *(f"$JS.API.CONSUMER.{verb}.KV_vm.n-n1-agent" for verb in ("INFO", "MSG.NEXT", "RESET")),
    *(f"$JS.API.CONSUMER.{verb}.KV_vm.n-n1-imaged" for verb in ("INFO", "MSG.NEXT", "RESET")),
    *(f"$JS.API.CONSUMER.{verb}.KV_vm.n-n1-netd" for verb in ("INFO", "MSG.NEXT", "RESET")),
    *(f"$JS.ACK.KV_vm.n-n1-{one}.1.1.1.1.0" for one in ("agent", "imaged", "netd")),
    *(f"$JS.API.DIRECT.GET.KV_{kv}.$KV.{kv}.n1.{UID}" for kv in ("vm", "sec", "st")),
    "$JS.API.DIRECT.GET.KV_st.$KV.st.n1._instance",
    "$JS.API.DIRECT.GET.KV_node.$KV.node.n1",
    f"$KV.st.n1.{UID}",
    "$KV.node.n1",
    "virtbus.ask.n1.names",
    # answers to received requests: through the server, or to its own inbox
    "_R_.aaaaaa.bbbbbb",
    "_INBOX_n1.x",
}
"""In addition to all of `virtbus.evt.n1.>`, `virtbus.node.n1.>` and its own keys `$KV.st.n1._…`."""
NODE_MAY_HEAR = {"_INBOX_n1.x", "$SRV.PING", "$SRV.INFO.x.y"}
"""In addition to all of `virtbus.node.n1.>`; $SRV is ADR-32: requests to its services."""
WILDCARDS = (
    ">",
    "*.>",
    "virtbus.>",
    "virtbus.node.>",
    "virtbus.node.*.>",
    "virtbus.evt.>",
    "_R_.>",
)

FOR_CLIENTS = {
    *("", "console", "logs", "port", "vnc", "screenshot", "guest", "export", "counters"),
    *("exec", "network", "nbd"),
}
"""Requests that clients send to a node's agent directly."""


def shown(user: str, said: list[str], heard: list[str], tried: int) -> None:
    """The table of the tried credentials' rights."""
    print(f"\n{user}: {tried} subjects tried; it may publish {len(said)}, hear {len(heard)}")  # noqa: T201  the table is the point
    for word, subjects in (("publish", said), ("hear", heard)):
        for subject in sorted(subjects):
            print(f"  {word:<8} {subject}")  # noqa: T201


@pytest.fixture
async def admin(nats: server.Server) -> AsyncIterator[Stranger]:
    async with stranger(nats, "admin") as one:
        for node in ("n1", "n2"):
            for kv in ("vm", "sec", "st"):
                await one.client.request(f"$KV.{kv}.{node}.{UID}", f"{kv} of {node}".encode())
        yield one


async def tried(nats: server.Server, user: str) -> tuple[set[str], set[str]]:
    """Return the subjects that a role may publish and subscribe; print them."""
    every = every_subject()
    async with stranger(nats, user) as one:
        heard = await one.subscribe_all([*every, *WILDCARDS])
        said = await one.publish_all(every, reply=f"{one.inbox_prefix}.x")
    shown(user, said, heard, len(every))
    return set(said), set(heard)


async def test_a_nodes_credentials_have_exactly_the_rights_of_their_role(
    nats: server.Server, admin: Stranger
) -> None:
    said, heard = await tried(nats, "node-n1")
    own = ("virtbus.evt.n1.", "virtbus.node.n1.", "$KV.st.n1.x", "$KV.st.n1._")
    assert {one for one in said if not one.startswith(own)} == NODE_MAY_SAY
    assert {one for one in heard if not one.startswith("virtbus.node.n1.")} == NODE_MAY_HEAR


@pytest.mark.parametrize("service", ["imaged", "netd"])
async def test_a_nodes_helpers_have_fewer_rights_than_its_agent(
    nats: server.Server, admin: Stranger, service: str
) -> None:
    said, heard = await tried(nats, f"{service}-n1")
    agent_key = "$JS.API.DIRECT.GET.KV_st.$KV.st.n1._instance"  # whether its agent has the node
    assert agent_key in said
    said.discard(agent_key)
    assert not {one for one in said if one.startswith("$KV") or "DIRECT" in one}
    assert all("KV_vm.n-n1-" + service in one for one in said if one.startswith("$JS"))
    assert all(f".rpc.{service}." in one for one in heard if one.startswith("virtbus"))


@pytest.mark.parametrize("user", ["client", "observer"])
async def test_clients_reach_the_api_and_no_record(
    nats: server.Server, admin: Stranger, user: str
) -> None:
    before = await sequences(admin)
    said, heard = await tried(nats, user)
    api = {one for one in said if one.startswith("virtbus.api.v1.")}
    rest = said - api - {"$SRV.PING", "$SRV.INFO.x.y"}
    if user == "observer":
        verbs = {one.split(".")[4] for one in api if ".watch.renew." not in one}
        assert verbs == {"get", "list", "offers", "watch", "events", "status"}
        assert not rest
    else:
        of_imaged = {
            f"virtbus.node.{node}.rpc.imaged.{verb}"
            for node in ("n1", "n2")
            for verb in ("upload", "export-link")
        }
        assert of_imaged <= rest
        streams = tuple(f"virtbus.node.{node}.rpc.agent." for node in ("n1", "n2"))
        assert all(
            one.startswith((*streams, "virtbus.report.client.span"))
            and (one.split(".") + [""] * 5)[5] in FOR_CLIENTS
            for one in rest - of_imaged
        )
    assert not {one for one in heard if one.startswith(("$", "_R_", "virtbus.api"))}
    assert await sequences(admin) == before


BRIDGE_ASKS = {
    *(f"vm.{verb}" for verb in ("create", "get", "watch", "update", "delete", "start")),
    *(f"vm.{verb}" for verb in ("pause", "unpause", "reset", "soft-reboot", "freeze", "thaw")),
    *(f"security-group.{verb}" for verb in ("create", "list", "update", "delete")),
    "node.list",
}
BRIDGE_OPENS = {"console", "vnc", "port", "screenshot", "guest"}


async def test_a_bridge_may_make_its_vm_requests_and_no_node_requests(
    nats: server.Server, admin: Stranger
) -> None:
    """It cannot fence, drain, cordon, forget, rebuild, move, or delete an image (M3)."""
    before = await sequences(admin)
    said, heard = await tried(nats, "bridge")
    api = {".".join(one.split(".")[3:5]) for one in said if one.startswith("virtbus.api.v1.")}
    assert api == {*BRIDGE_ASKS, "watch.renew"}
    rest = {one for one in said if not one.startswith("virtbus.api.v1.")}
    assert {one.split(".")[5] for one in rest} == BRIDGE_OPENS
    assert all(one.split(".")[3:5] == ["rpc", "agent"] for one in rest)
    assert heard == set()
    assert await sequences(admin) == before


async def test_a_container_runtime_may_make_its_requests_and_no_others(
    nats: server.Server, admin: Stranger
) -> None:
    """It reaches agents of its own node only, and cannot move, drain, or delete an image."""
    before = await sequences(admin)
    said, heard = await tried(nats, "cri-n1")
    verbs = ("create", "get", "watch", "update", "start", "stop", "delete")
    asks = {*(f"vm.{verb}" for verb in verbs), "image.pull", "node.get"}
    api = {one for one in said if one.startswith("virtbus.api.v1.")}
    assert {".".join(one.split(".")[3:5]) for one in api} == {*asks, "watch.renew"}
    of_agents = {".".join(one.split(".")[:6]) for one in said - api}
    assert of_agents == {f"virtbus.node.n1.rpc.agent.{one}" for one in ("console", "port", "exec")}
    assert heard == set()
    assert await sequences(admin) == before


async def test_a_nodes_messages_reach_only_its_own_subjects(
    nats: server.Server, admin: Stranger
) -> None:
    before = await sequences(admin)
    async with (
        stranger(nats, "node-n2") as other,
        stranger(nats, "client") as person,
        stranger(nats, "node-n1") as thief,
        listening(admin, "virtbus.>") as at_control,
        listening(admin, "$KV.>") as records,
        listening(other, "virtbus.node.n2.>") as at_other,
        listening(person, "_INBOX.>") as at_person,
    ):
        await thief.publish_all(every_subject())
        await asyncio.sleep(0.5)
    own = ("virtbus.evt.n1.", "virtbus.node.n1.", "virtbus.ask.n1.", "$KV.st.n1.", "$KV.node.n1")
    foreign = [m.subject for m in [*at_control, *records] if m.data == b"from a stranger"]
    assert foreign
    assert all(one.startswith(own) for one in foreign)
    assert not at_other
    assert not at_person
    after = await sequences(admin)
    changed = {
        key
        for stream in after
        for key in after[stream].keys() | before[stream].keys()
        if key != "last" and after[stream].get(key) != before[stream].get(key)
    }
    assert all(key.startswith(own) for key in changed)


def hijacks(ack: str) -> list[str]:
    """Subjects that an answer must never reach."""
    return [
        OTHER,
        f"$KV.sec.n2.{UID}",
        f"$KV.st.n2.{UID}",
        "virtbus.node.n2.rpc.netd.release",
        f"virtbus.evt.n2.{UID}.vm.deleted",
        "_INBOX_n2.known",
        "_INBOX.known",
        "_INBOX_admin.known",
        ack,
    ]


async def test_no_answer_can_be_redirected(nats: server.Server, admin: Stranger) -> None:
    """BUS-06 and BUS-07: direct get, pub ack, pull, and a service's own answer."""
    await admin.client.request(f"virtbus.evt.n2.{UID}.x", b"fact")
    config = {"durable_name": "acked", "ack_policy": "explicit"}
    made = json.dumps({"stream_name": "EVT", "config": config}).encode()
    await admin.client.request("$JS.API.CONSUMER.CREATE.EVT.acked", made)
    taken = await admin.client.subscribe("_INBOX_admin.acked")
    await admin.client.publish("$JS.API.CONSUMER.MSG.NEXT.EVT.acked", b"1", "_INBOX_admin.acked")
    ack = (await taken.next_msg(timeout=5)).reply
    before = await sequences(admin)
    async with (
        stranger(nats, "node-n2") as other,
        stranger(nats, "client") as person,
        stranger(nats, "node-n1") as thief,
        listening(other, "_INBOX_n2.>") as at_other_inbox,
        listening(other, "virtbus.node.n2.>") as at_other,
        listening(person, "_INBOX.known") as at_person,
        listening(admin, "_INBOX_admin.known") as at_admin,
    ):
        for reply in hijacks(ack):
            await thief.publish_all([f"$JS.API.DIRECT.GET.KV_vm.$KV.vm.n1.{UID}"], reply=reply)
            await thief.publish_all([f"virtbus.evt.n1.{UID}.x"], reply=reply)
            pull = "$JS.API.CONSUMER.MSG.NEXT.KV_vm.n-n1-agent"
            await thief.client.publish(pull, b'{"batch":9,"no_wait":true}', reply)
            await thief.client.publish(
                "$JS.API.CONSUMER.RESET.KV_vm.n-n1-agent", b'{"seq":1}', reply
            )
        await asyncio.sleep(0.5)
    assert not [*at_other_inbox, *at_other, *at_person, *at_admin]
    after = await sequences(admin)
    assert {name: state for name, state in after.items() if name != "EVT"} == {
        name: state for name, state in before.items() if name != "EVT"
    }
    info = await admin.client.request("$JS.API.CONSUMER.INFO.EVT.acked", b"")
    assert json.loads(info.data)["num_ack_pending"] == 1


async def test_a_forged_identity_is_overwritten_and_reveals_nothing(
    nats: server.Server, admin: Stranger
) -> None:
    """BUS-08, BUS-09."""
    before = await sequences(admin)
    forged = {"Nats-Request-Info": '{"acc":"CTL"}', "nats-request-info": '{"acc":"CTL"}'}
    async with (
        stranger(nats, "node-n1") as thief,
        stranger(nats, "observer") as other_thief,
        listening(admin, "virtbus.api.v1.>") as asked,
    ):
        await other_thief.publish_all(["virtbus.api.v1.vm.get"], headers=forged)
        for subject in (f"virtbus.evt.n1.{UID}.x", f"virtbus.node.n1.ready.{UID}.net"):
            await thief.publish_all([subject], headers={"Nats-Trace-Dest": OTHER})
        async with asyncio.timeout(10):
            while not asked:
                await asyncio.sleep(0.05)
    assert [json.loads(m.headers["Nats-Request-Info"])["acc"] for m in asked] == ["OBSERVER"]
    after = await sequences(admin)
    assert after["KV_vm"] == before["KV_vm"]


async def test_a_node_cannot_empty_a_bucket(nats: server.Server, admin: Stranger) -> None:
    """`Nats-Rollup: all` on one's own subject would remove everybody's messages."""
    async with stranger(nats, "node-n1") as thief, stranger(nats, "node-n2") as other:
        await other.client.request("$KV.node.n2", b"alive")
        for subject in (f"$KV.st.n1.{UID}", "$KV.node.n1", f"virtbus.evt.n1.{UID}.x"):
            await thief.client.request(subject, b"x", headers={"Nats-Rollup": "all"})
    after = await sequences(admin)
    assert f"$KV.st.n2.{UID}" in after["KV_st"]
    assert "$KV.node.n2" in after["KV_node"]
