"""The `kubevirt` object, by which clients see that KubeVirt's API is served, and how."""

from virtbus.kubebridge.core.kubevirt.machine import Condition
from virtbus.kubebridge.core.kubevirt.part import Anything, Int64, Part, must, said
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC


class Generation(Part):
    """An object that was installed."""

    group: str = must("Its group.")
    hash: str | None = said("Of what was written.")
    lastGeneration: Int64 = must("Its generation.")
    name: str = must("Its name.")
    namespace: str | None = said("Its namespace.")
    resource: str = must("Its resource.")


class InstallationStatus(Part):
    """What is installed; written by virtbus."""

    conditions: list[Condition] | None = said("Available, Progressing, Degraded, Created.")
    defaultArchitecture: str | None = said("Of VMs that name none.")
    generations: list[Generation] | None = said("What was installed.", **ATOMIC)
    observedDeploymentConfig: str | None = said("How it is installed.")
    observedDeploymentID: str | None = said("Which installation it is.")
    observedGeneration: Int64 | None = said("The generation that was looked at.")
    observedKubeVirtRegistry: str | None = said("Where it came from.")
    observedKubeVirtVersion: str | None = said("The version whose API is served.")
    operatorVersion: str | None = said("Who serves it.")
    outdatedVirtualMachineInstanceWorkloads: int | None = said("Instances of older launchers.")
    phase: str | None = said("Deployed.")
    synchronizationAddresses: list[str] | None = said("For moves between clusters.", **ATOMIC)
    targetDeploymentConfig: str | None = said("How it shall be installed.")
    targetDeploymentID: str | None = said("Which installation it shall be.")
    targetKubeVirtRegistry: str | None = said("Where it shall come from.")
    targetKubeVirtVersion: str | None = said("The version whose API shall be served.")


class KubeVirt(Part):
    """KubeVirt's API as virtbus serves it; there is one, for clients to look at."""

    spec: Anything | None = said("KubeVirt's settings; virtbus has its own and looks at none.")
    status: InstallationStatus | None = said("What is served; written by virtbus.")
