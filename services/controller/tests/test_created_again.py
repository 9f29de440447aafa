"""A create under the uid of an existing VM: the same request, or another one."""

import functools
from typing import Any

from services.controller.tests.fleets import uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.bus.client.ports import EntryKind
from virtbus.schemas import subjects


@played()
async def test_a_create_of_a_uid_with_other_secrets_is_refused_by_path_and_digest(
    made: World,
) -> None:
    create = functools.partial(made.vm, "create", name="web", image="tiny", uid=uid(1))
    first = await create(user_data="canary-1")

    async def refuses(path: str, **what: Any) -> None:
        error = await refused(create(**what))
        assert (error.code, error.reason) == (409, "uid_taken")
        assert [detail.path for detail in error.body.details] == [path]
        assert "canary" not in error.body.model_dump_json()

    secret, cores = "spec.volumes[1].cloud_init_no_cloud", "spec.domain.cpu.cores"
    await refuses(secret, user_data="canary-2")
    await refuses(secret)
    await refuses(cores, user_data="canary-1", cpus=2)
    assert (await create(user_data="canary-1")).revision == first.revision
    spec = first.spec.model_dump(mode="json")
    spec["domain"]["cpu"]["cores"] = 2
    await made.ask("update", uid=uid(1), revision=first.revision, spec=spec)
    await refuses(cores, user_data="canary-1")
    await refuses(secret, user_data="canary-2", cpus=2)
    await refuses(secret, cpus=2)
    assert (await create(user_data="canary-1", cpus=2)).generation == 2
    error = await refused(create(uid=uid(2), cpus=2))
    assert error.reason == "name_taken"


@played()
async def test_a_refused_create_leaves_no_secrets_with_a_vm_that_has_none(made: World) -> None:
    await made.vm("create", name="web", image="tiny", uid=uid(1))
    await refused(made.vm("create", name="web", image="tiny", uid=uid(1), user_data="canary"))
    entry = await made.host.get(subjects.vm_secret("n1", uid(1)))
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
