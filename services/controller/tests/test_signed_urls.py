"""The query of an image's URL may be a signature: who looks at VMs does not see it (L4)."""

from services.controller.tests.fleets import uid
from services.controller.tests.virtual import World, run, settle, world

from virtbus.schemas.image import shown_ref

SIGNED = "https://images.example/a.qcow2?X-Signature=secret"


async def _shown(made: World) -> str:
    """All that the reading half of the API says of the VM, and all facts."""
    answers = [await made.ask("get", uid=uid(1)), await made.ask("list")]
    async with made.watch() as replies:
        async for reply in replies:
            answers.append(reply)
            if reply.get("synced"):
                break
    answers += [one.body for one in await made.client.history("virtbus.evt.>")]
    return repr(answers)


def test_views_and_facts_show_the_url_without_its_query_and_the_record_keeps_it() -> None:
    async def body() -> None:
        async with world() as made:
            created = await made.ask("create", name="web", image=SIGNED, uid=uid(1))
            await settle()
            assert "secret" not in repr(created)
            shown = await _shown(made)
            assert "https://images.example/a.qcow2" in shown
            assert "secret" not in shown
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.spec.volumes[0].image_ref == SIGNED

    run(body)


def test_a_spec_that_was_read_may_be_given_back() -> None:
    async def body() -> None:
        async with world() as made:
            view = (await made.ask("create", name="web", image=SIGNED, uid=uid(1)))["vm"]
            want = {"uid": uid(1), "revision": view["revision"], "spec": view["spec"]}
            again = await made.ask("update", **want, labels={"a": "b"})
            assert again["labels"] == {"a": "b"}
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.generation == 1
            assert stored.spec.volumes[0].image_ref == SIGNED

    run(body)


def test_a_pinned_reference_keeps_its_digest() -> None:
    digest = "sha256:" + "5e" * 32
    assert shown_ref(f"{SIGNED}@{digest}") == f"https://images.example/a.qcow2@{digest}"
    assert shown_ref("tiny") == "tiny"
