"""The credentials of imaged and netd: exactly their subjects, and one answer to each request."""

import asyncio
from typing import Any

import pytest
from bus.tests.strangers import UID, Stranger, every_subject, listening, stranger
from nats.errors import NoRespondersError

from virtbus.bus.client.connection import connect
from virtbus.bus.provisioning import server
from virtbus.schemas import subjects
from virtbus.schemas.events import EventKind

pytestmark = pytest.mark.integration

PARTS = {"imaged": "image", "netd": "net"}
FACTS = {
    "imaged": ("image.pulling", "image.ready", "image.failed", "disks.released", "trace.span"),
    "netd": ("network.ready", "network.failed", "network.released", "trace.span"),
}
MORE = {
    "imaged": {f"virtbus.node.n1.progress.{UID}.image"},
    "netd": {"virtbus.ask.n1.names"},
}


def all_there_is() -> list[str]:
    """Every subject of the system, and every event, ready event and progress of two nodes."""
    found = every_subject()
    for node in ("n1", "n2"):
        found += [subjects.event(node, UID, kind) for kind in EventKind]
        found += [subjects.node_event(node, kind) for kind in EventKind if kind.startswith("node.")]
        found += [subjects.ready(node, UID, part) for part in PARTS.values()]
        found += [subjects.progress(node, UID, step) for step in ("image", "net", "x")]
        found += [subjects.service_report(node, service) for service in ("imaged", "netd", "agent")]
        found += [f"virtbus.node.{node}.x", f"virtbus.evt.{node}.x", f"_INBOX_{node}.mux.2"]
        found += [f"_INBOX_{node}_{service}.x" for service in PARTS]
        found += [
            subjects.rpc(node, service, verb)
            for service, verbs in {
                "agent": ("command", "records", "join", "audit", "console"),
                "imaged": ("ensure", "release", "inspect", "pull", "delete", "list"),
                "netd": ("ensure", "release", "inspect"),
            }.items()
            for verb in verbs
        ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("service", PARTS)
async def test_a_helper_publishes_only_its_own_subjects(nats: server.Server, service: str) -> None:
    every = all_there_is()
    async with stranger(nats, f"{service}-n1") as one:
        said = {x.replace(".x.", f".{UID}.") for x in await one.publish_all(every)}
        heard = set(await one.subscribe_all([*every, "virtbus.>", "virtbus.node.n1.>", ">"]))
    own = f"KV_vm.n-n1-{service}"
    facts = {f"virtbus.evt.n1.{UID}.{kind}" for kind in FACTS[service]}
    assert said == {
        *(f"$JS.API.CONSUMER.{verb}.{own}" for verb in ("MSG.NEXT", "INFO", "RESET")),
        f"$JS.ACK.{own}.1.1.1.1.0",
        "$JS.API.DIRECT.GET.KV_st.$KV.st.n1._instance",  # whether its agent holds the node
        *facts,
        f"virtbus.node.n1.ready.{UID}.{PARTS[service]}",
        f"virtbus.node.n1.report.{service}",
        *MORE[service],
    }
    rpcs = {one for one in every if one.startswith(f"virtbus.node.n1.rpc.{service}.")}
    assert heard == {*rpcs, f"_INBOX_n1_{service}.x", "$SRV.PING", "$SRV.INFO.x.y"}


@pytest.mark.parametrize("service", PARTS)
async def test_a_helper_answers_each_request_once_and_no_other(
    nats: server.Server, service: str
) -> None:
    """It sees the reply subject of each `ensure`, and guesses the next one from it."""
    asked = subjects.rpc("n1", service, "ensure")
    async with (
        stranger(nats, f"{service}-n1") as thief,
        stranger(nats, "node-n1") as agent,
        stranger(nats, "controller") as controller,
        listening(agent, "_INBOX_n1.>") as at_agent,
    ):
        replies: list[str] = []

        async def answer(msg: Any) -> None:
            replies.append(msg.reply)
            for data in (b"first", b"second"):
                await thief.client.publish(msg.reply, data)
            await thief.client.publish(f"{msg.reply}0", b"guessed")

        await thief.client.subscribe(asked, cb=answer)
        await thief.heard_out()
        await agent.client.publish(asked, b"ensure", "_INBOX_n1.mux.1")
        assert (await answered(controller, asked)).data == b"first"
        taken = await thief.publish_all(["_INBOX_n1.mux.2"])
        await asyncio.sleep(0.2)
    assert [msg.data for msg in at_agent] == [b"first"]
    assert len(replies) == 2
    assert taken == []


async def answered(one: Stranger, subject: str) -> Any:
    """Return the answer to a request; another account learns of a subscription a moment later."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await one.client.request(subject, b"of a controller")
            except NoRespondersError:
                await asyncio.sleep(0.05)


async def test_a_list_of_many_records_leaves_the_server_nothing_to_remember(
    nats: server.Server,
) -> None:
    """The acknowledgements of its own watch are allowed as such, not as answers."""
    async with (
        connect(nats.settings("imaged-n1"), name="imaged") as bus,
        bus.node_watch("n1", "imaged") as watch,
        asyncio.timeout(10),
    ):
        await anext(aiter(watch))
    async with stranger(nats, "imaged-n1") as one:
        assert await one.publish_all(["$JS.ACK.KV_vm.n-n1-imaged.1.9.9.1.0"])
