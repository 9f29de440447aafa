"""Fields of a VirtualMachine except its template, and the annotations that KubeVirt obeys."""

from virtbus.kubebridge.core.fields.row import Kind, below, ignored, mapped, refused
from virtbus.schemas.vm import RunStrategy

TYPES = "instance types are not there yet"

VM = (
    below(""),
    mapped("running", Kind.FLAG, "", "true: Always; false: Halted"),
    mapped(
        "runStrategy",
        Kind.TEXT,
        "",
        "when a VMI is made of the template",
        values=tuple(str(one) for one in RunStrategy),
        instead="write " + ", ".join(RunStrategy),
    ),
    below("template"),
    mapped(
        "template.metadata",
        Kind.ANY,
        "",
        "labels and annotations of the VMI; annotations have 16 KiB at most",
    ),
    mapped("template.spec", Kind.ANY, "", "the VMI's spec, with the fields below"),
    refused(
        "dataVolumeTemplates[]",
        "claims of storage are not there yet",
        "use a containerDisk, or an emptyDisk for data that may go with the VM",
    ),
    refused("instancetype", TYPES, "write cpu and memory into the template"),
    refused("preference", TYPES, "write the devices into the template"),
    mapped(
        "updateVolumesStrategy",
        Kind.TEXT,
        "",
        "changed volumes are those of the next VMI",
        values=("Replacement",),
        instead="leave it out: volumes do not migrate yet",
    ),
)

ANNOTATIONS = (
    ignored(
        "kubevirt.io/keep-launcher-alive-after-failure",
        "there is no launcher to keep; a failed VM's console log stays until it is deleted",
    ),
    ignored("kubevirt.io/allow-pod-bridge-network-live-migration", "there is no migration yet"),
    ignored("kubevirt.io/libvirt-log-filters", "of the launcher's libvirt; there is none"),
    ignored("kubevirt.io/memfd", "how QEMU holds memory; a guest sees nothing of it"),
    ignored("kubevirt.io/free-page-reporting-disabled", "a matter of the host's memory"),
    ignored("kubevirt.io/latest-observed-api-version", "KubeVirt's own note"),
    ignored("kubevirt.io/storage-observed-api-version", "KubeVirt's own note"),
    ignored("kubevirt.io/vm-generation", "KubeVirt's own note"),
    ignored("kubevirt.io/pci-topology-version", "KubeVirt's own note"),
    refused(
        "hooks.kubevirt.io/hookSidecars",
        "no program changes a guest's definition",
        "leave it out; what it changed may be a field",
    ),
    refused("kubevirt.io/ignitiondata", "there is no Ignition", "use cloudInitNoCloud"),
    refused(
        "kubevirt.io/placePCIDevicesOnRootComplex", "devices are placed by virtbus", "leave it out"
    ),
    refused("kubevirt.io/disablePCIHole64", "the PCI hole is QEMU's", "leave it out"),
    refused(
        "kubevirt.io/immediate-data-volume-creation",
        "claims of storage are not there yet",
        "leave it out",
    ),
)
"""Of a VM's template or a VMI. What is not here is nobody's command: it is left alone."""
