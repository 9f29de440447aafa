"""Defines the names of KubeVirt's finalizers and labels, which users and tools rely on."""

VM_FINALIZER = "kubevirt.io/virtualMachineControllerFinalize"
"""Keeps a VM until its VMI is gone."""
VMI_FINALIZER = "kubevirt.io/foregroundDeleteVirtualMachine"
"""Keeps a VMI until nothing of its guest is left on any node."""
NODE_LABEL = "kubevirt.io/nodeName"
VM_LABEL = "vm.kubevirt.io/name"
RESERVED_LABELS = (
    *(NODE_LABEL, "kubevirt.io/created-by", "kubevirt.io/migrationJobUID"),
    *("kubevirt.io/outdatedLauncherImage", "kubevirt.io/domain", "kubevirt.io/vmi-name"),
)
"""Labels that only the bridge may set on a VMI."""
