"""Declares the fields of a VirtualMachine outside its template, and KubeVirt's annotations."""

from virtbus.kubebridge.core.fields.row import FieldType, below, ignored, mapped, refused
from virtbus.schemas.vm import RunStrategy

IGNITION = "kubevirt.io/ignitiondata"
TYPES = "instance types are not supported yet"

VM = (
    below(""),
    mapped("running", FieldType.FLAG, "", "true means Always, false means Halted"),
    mapped(
        "runStrategy",
        FieldType.TEXT,
        "",
        "decides when a VMI is created from the template",
        values=tuple(str(one) for one in RunStrategy),
        instead="write " + ", ".join(RunStrategy),
    ),
    below("template"),
    mapped(
        "template.metadata",
        FieldType.ANY,
        "",
        "labels and annotations of the VMI; annotations are limited to 16 KiB",
    ),
    mapped("template.spec", FieldType.ANY, "", "the VMI's spec"),
    refused(
        "dataVolumeTemplates[]",
        "storage claims are not supported yet",
        "use a containerDisk, or an emptyDisk for data that may be deleted with the VM",
    ),
    refused("instancetype", TYPES, "write cpu and memory into the template"),
    refused("preference", TYPES, "write the devices into the template"),
    mapped(
        "updateVolumesStrategy",
        FieldType.TEXT,
        "",
        "changed volumes take effect with the next VMI",
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
    ignored(
        "kubevirt.io/libvirt-log-filters",
        "it configures the launcher's libvirt, and there is no launcher",
    ),
    ignored("kubevirt.io/memfd", "a detail of QEMU's memory that guests do not see"),
    ignored("kubevirt.io/free-page-reporting-disabled", "a detail of the host's memory"),
    ignored("kubevirt.io/latest-observed-api-version", "KubeVirt's own record"),
    ignored("kubevirt.io/storage-observed-api-version", "KubeVirt's own record"),
    ignored("kubevirt.io/vm-generation", "KubeVirt's own record"),
    ignored("kubevirt.io/pci-topology-version", "KubeVirt's own record"),
    refused(
        "hooks.kubevirt.io/hookSidecars",
        "hook sidecars are not supported",
        "leave it out; use fields of the spec if they exist",
    ),
    mapped(
        IGNITION,
        FieldType.TEXT,
        "spec.ignition.config",
        "Ignition's JSON, for guests that read fw_cfg; 16 KiB at most",
    ),
    refused(
        "kubevirt.io/placePCIDevicesOnRootComplex",
        "virtbus assigns PCI addresses itself",
        "leave it out",
    ),
    refused("kubevirt.io/disablePCIHole64", "the PCI hole is QEMU's default", "leave it out"),
    refused(
        "kubevirt.io/immediate-data-volume-creation",
        "storage claims are not supported yet",
        "leave it out",
    ),
)
"""Annotations of a VM's template or of a VMI. Annotations that are not listed have no effect."""
