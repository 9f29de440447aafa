"""The bridge's cache of its VMs: an answer never brings back a VM that has left the watch."""

from services.kubebridge.tests.manifests import UID
from services.kubebridge.tests.world import view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer


def test_the_late_answer_to_a_delete_is_not_stored() -> None:
    """The watch merged the change to deleting with the end, so the end is not certain."""
    vms = VmInformer(MemoryBus(MemoryServer()), "c1")
    told: list[str] = []
    vms.notify = told.append
    running = view(UID).model_dump(mode="json")
    vms._changed({"change": running})
    vms._changed({"gone": UID})
    vms.answered(view(UID, deleting=True, revision=9))
    assert (vms.get(UID), vms.gone(UID), len(told)) == (None, False, 2)
    vms._changed({"change": running})
    vms.answered(view(UID, deleting=True, revision=9))
    there = vms.get(UID)
    assert there is not None
    assert there.deleting
