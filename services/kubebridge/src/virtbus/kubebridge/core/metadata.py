"""The names that KubeVirt's users, tools and other controllers look for."""

GROUP_VERSION = "kubevirt.io/v1"
VM_KIND, VMI_KIND = "VirtualMachine", "VirtualMachineInstance"
CONTROLLER_FINALIZER = "kubevirt.io/virtualMachineControllerFinalize"
VM_FINALIZER = CONTROLLER_FINALIZER
"""A VM stays until its VMI is gone."""
VMI_FINALIZER = "kubevirt.io/foregroundDeleteVirtualMachine"
"""A VMI stays until nothing of its guest is left on any node."""
NODE_LABEL = "kubevirt.io/nodeName"
VM_LABEL = "vm.kubevirt.io/name"
RESERVED_LABELS = (
    *(NODE_LABEL, "kubevirt.io/created-by", "kubevirt.io/migrationJobUID"),
    *("kubevirt.io/outdatedLauncherImage", "kubevirt.io/domain", "kubevirt.io/vmi-name"),
)
"""Nobody but the bridge sets them on a VMI."""
