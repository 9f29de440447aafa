"""Defines the model of the `kubevirt` object, in which clients read the version of the API."""

from virtbus.documents.crds.models.machine import Condition
from virtbus.documents.crds.models.part import Anything, Int64, Part, must, said
from virtbus.documents.crds.models.pods import ATOMIC


class Generation(Part):
    """An object that the installation created."""

    group: str = must("API group of the object.")
    hash: str | None = said("Hash of the object's content.")
    lastGeneration: Int64 = must("Generation of the object.")
    name: str = must("Name of the object.")
    namespace: str | None = said("Namespace of the object.")
    resource: str = must("Resource name of the object.")


class InstallationStatus(Part):
    """State of the installation. virtbus writes it."""

    conditions: list[Condition] | None = said(
        "Conditions: Available, Progressing, Degraded and Created."
    )
    defaultArchitecture: str | None = said("CPU architecture of VMs that name none.")
    generations: list[Generation] | None = said("Objects that the installation created.", **ATOMIC)
    observedDeploymentConfig: str | None = said("Configuration that is installed.")
    observedDeploymentID: str | None = said("Id of the configuration that is installed.")
    observedGeneration: Int64 | None = said("Generation of the spec that was last processed.")
    observedKubeVirtRegistry: str | None = said("Container registry of the installed images.")
    observedKubeVirtVersion: str | None = said("Version of KubeVirt's API that is served.")
    operatorVersion: str | None = said("Version of the software that serves the API.")
    outdatedVirtualMachineInstanceWorkloads: int | None = said(
        "Number of instances that run in an outdated launcher."
    )
    phase: str | None = said("Phase of the installation: Deployed.")
    synchronizationAddresses: list[str] | None = said(
        "Addresses for migrations between clusters.", **ATOMIC
    )
    targetDeploymentConfig: str | None = said("Configuration that is to be installed.")
    targetDeploymentID: str | None = said("Id of the configuration that is to be installed.")
    targetKubeVirtRegistry: str | None = said("Container registry of the images to install.")
    targetKubeVirtVersion: str | None = said("Version of KubeVirt's API that is to be served.")


class KubeVirt(Part):
    """KubeVirt's API as virtbus serves it. There is one such object, for clients to read."""

    spec: Anything | None = said(
        "Settings of KubeVirt. virtbus ignores them; it has settings of its own."
    )
    status: InstallationStatus | None = said("State of the installation. virtbus writes it.")
