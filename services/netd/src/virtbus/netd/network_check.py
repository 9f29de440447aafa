"""Compares one network with the host, and restores what is missing."""

from virtbus.netd.builder import Builder
from virtbus.netd.core.finding import NetworkFinding, repaired, unbuilt
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.network_entry import NetworkEntry
from virtbus.schemas.errors import VirtbusError


async def examined(builder: Builder, entry: NetworkEntry, *, runs: bool) -> NetworkFinding | None:
    """Mend a network, and return a finding if the network was incomplete.

    The caller holds the VM's lock.

    `runs` says if the guest runs. With a running guest, a network that cannot be mended, or whose
    tap the guest has lost, becomes failed. Without a guest, the next ensure makes such a network
    again.
    """
    attachment = entry.attachment
    named = builder.stands(attachment)
    faults = [] if named else [f"{attachment.netns} is gone"]
    stands = await builder.found(attachment)
    left: list[str] = []
    try:
        faults += await builder.mend(attachment) if stands else []
        if stands and faults:  # some faults remain if the kernel lacks a module
            left = await in_thread(lambda: builder.links.faults(attachment.joined))
    except (VirtbusError, OSError) as error:
        faults.append(str(error))
        stands = False
    if runs and not (stands and await in_thread(lambda: builder.links.all_held(attachment))):
        return entry.cut_off(faults)
    if not stands:
        entry.mark_unbuilt()
        return unbuilt(attachment, faults)
    return repaired(attachment, faults, left) if faults else None
