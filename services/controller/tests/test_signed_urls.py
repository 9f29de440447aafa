"""The query of an image's URL may be a signature, so it is a secret input of its VM (L4)."""

import hashlib

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.provisioning.backup import take
from virtbus.controller.core.admission import admit
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import sealed_ref, shown_ref
from virtbus.schemas.wire import encode

QUERY = "X-Signature=secret"
SIGNED = f"https://images.example/a.qcow2?{QUERY}"
SEALED = f"https://images.example/a.qcow2?sha256:{hashlib.sha256(QUERY.encode()).hexdigest()}"
PIN = "sha256:" + "5e" * 32


async def _shown(made: World) -> str:
    """Return every answer of the reading API about the VM, and all events."""
    answers = [await made.ask("get", uid=uid(1)), await made.ask("list")]
    async with made.watch() as replies:
        async for reply in replies:
            answers.append(reply)
            if reply.get("synced"):
                break
    answers += [one.body for one in await made.client.history("virtbus.evt.>")]
    return repr(answers)


def test_views_facts_and_records_have_the_url_without_its_query() -> None:
    async def body() -> None:
        async with world() as made:
            created = await made.ask("create", name="web", image=SIGNED, uid=uid(1))
            await settle()
            assert "secret" not in repr(created)
            shown = await _shown(made)
            assert "https://images.example/a.qcow2" in shown
            assert "secret" not in shown
            assert "sha256" not in shown, "who has the hash may be taken for who has the query"
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.spec.volumes[0].image_ref == SEALED

    run(body)


def test_the_query_is_in_the_secret_inputs_and_in_no_backup_without_them() -> None:
    async def body() -> None:
        async with world() as made:
            await made.ask("create", name="web", image=SIGNED, uid=uid(1))
            await settle()
            whole = await take(made.host)
            holding = {key for key, value in whole.values.items() if QUERY.encode() in value}
            assert holding == {f"$KV.sec.{(await _node(made))}.{uid(1)}"}
            assert QUERY.encode() not in b"".join(
                (await take(made.host, secrets=False)).values.values()
            )

    run(body)


async def _node(made: World) -> str:
    stored = await made.stored(uid(1))
    assert stored is not None
    return stored.node


@pytest.mark.parametrize("again", ["as it is shown", "as it was given"])
def test_an_unchanged_spec_may_be_sent_again(again: str) -> None:
    async def body() -> None:
        async with world() as made:
            view = (await made.ask("create", name="web", image=SIGNED, uid=uid(1)))["vm"]
            if again == "as it was given":
                view["spec"]["volumes"][0]["image"]["ref"] = SIGNED
            want = {"uid": uid(1), "revision": view["revision"], "spec": view["spec"]}
            done = await made.ask("update", **want, labels={"a": "b"})
            assert done["labels"] == {"a": "b"}
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.generation == 1
            assert stored.spec.volumes[0].image_ref == SEALED

    run(body)


def test_another_query_is_another_image() -> None:
    async def body() -> None:
        async with world() as made:
            view = (await made.ask("create", name="web", image=SIGNED, uid=uid(1)))["vm"]
            view["spec"]["volumes"][0]["image"]["ref"] = SIGNED + "2"
            want = {"uid": uid(1), "revision": view["revision"], "spec": view["spec"]}
            with pytest.raises(VirtbusError, match="cannot change"):
                await made.ask("update", **want)

    run(body)


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"image": SEALED}, "image"),
        ({"image": f"{SEALED}@{PIN}"}, "image"),
        (
            {"spec": {"volumes": [{"name": "root", "image": {"ref": SEALED}}]}},
            "spec.volumes[0].image.ref",
        ),
    ],
)
def test_no_request_names_an_image_by_the_hash_of_anothers_query(
    data: dict[str, object], path: str
) -> None:
    with pytest.raises(VirtbusError) as refused:
        admit({"name": "web", **data}, uid(1))
    assert [detail.path for detail in refused.value.body.details] == [path]


def test_a_sealed_reference_is_sealed_once_and_keeps_its_digest() -> None:
    assert sealed_ref(SIGNED) == (SEALED, QUERY)
    assert sealed_ref(SEALED) == (SEALED, "")
    assert sealed_ref(f"{SIGNED}@{PIN}") == (f"{SEALED}@{PIN}", QUERY)
    for ref in ("tiny", "https://h/a.qcow2", "docker://quay.io/a/b:1", f"tiny@{PIN}"):
        assert sealed_ref(ref) == (ref, "")


def test_a_url_with_a_short_query_still_fits_into_its_record() -> None:
    long = "https://images.example/" + "a" * 2000 + "?b"
    with pytest.raises(VirtbusError) as refused:
        admit({"name": "web", "image": long}, uid(1))
    assert "too long" in refused.value.body.details[0].message
    done = admit({"name": "web", "image": long.replace("a" * 100, "")}, uid(1))
    type(done.spec).model_validate_json(done.spec.model_dump_json())
    assert b"?b" not in encode(done.spec)


def test_a_pinned_reference_keeps_its_digest() -> None:
    assert shown_ref(f"{SIGNED}@{PIN}") == f"https://images.example/a.qcow2@{PIN}"
    assert shown_ref("tiny") == "tiny"
