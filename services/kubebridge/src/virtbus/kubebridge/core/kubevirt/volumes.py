"""What fills disks (volumes), what interfaces join (networks), and keys for the guest."""

from typing import Annotated

from pydantic import Field

from virtbus.kubebridge.core.kubevirt.part import Empty, Int32, Part, Quantity, must, said
from virtbus.kubebridge.core.kubevirt.pods import WHOLE, LocalReference


class CloudInit(Part):
    """What cloud-init reads at the first boot: inline, Base64, or from Secrets."""

    networkData: str | None = said("The network's configuration.")
    networkDataBase64: str | None = said("The same in Base64.")
    networkDataSecretRef: LocalReference | None = said(
        "A Secret with the key networkdata.", **WHOLE
    )
    secretRef: LocalReference | None = said("A Secret with the key userdata.", **WHOLE)
    userData: str | None = said("The user data, such as #cloud-config.")
    userDataBase64: str | None = said("The same in Base64.")


class ConfigMapVolume(Part):
    """A ConfigMap's keys as files on a disk."""

    name: str | None = said("Its name.")
    optional: bool | None = said("It need not be there.")
    volumeLabel: str | None = said("The file system's label.")


class SecretVolume(Part):
    """A Secret's keys as files on a disk."""

    optional: bool | None = said("It need not be there.")
    secretName: str | None = said("Its name.")
    volumeLabel: str | None = said("The file system's label.")


class ContainerDisk(Part):
    """A disk out of a container image; what the guest writes goes with the VMI."""

    image: str = must("The image.")
    imagePullPolicy: str | None = said("Always (default for :latest), IfNotPresent or Never.")
    imagePullSecret: str | None = said("A Secret with the registry's login.")
    path: str | None = said("The disk in the image; by default the one file in /disk.")


class ContainerPath(Part):
    """A path of the launcher's container."""

    path: Annotated[str, Field(max_length=4096)] = must("From / on.")
    readOnly: bool | None = said("True.")


class DataVolumeVolume(Part):
    """A DataVolume's claim."""

    hotpluggable: bool | None = said("It may be unplugged.")
    name: str = must("The DataVolume.")


class Claim(Part):
    """A PersistentVolumeClaim."""

    claimName: str = must("Its name.")
    hotpluggable: bool | None = said("It may be unplugged.")
    readOnly: bool | None = said("The guest cannot write.")


class EphemeralClaim(Part):
    """A claim that is read."""

    claimName: str = must("Its name.")
    readOnly: bool | None = said("It is only read.")


class EphemeralVolume(Part):
    """A claim whose changes go with the VMI."""

    persistentVolumeClaim: EphemeralClaim | None = said("The claim.")


class FieldReference(Part):
    """A field of the object."""

    apiVersion: str | None = said("Of which version.")
    fieldPath: str = must("Its path.")


class ResourceReference(Part):
    """A resource of the object."""

    containerName: str | None = said("Of which container.")
    divisor: Quantity | None = said("In which unit.")
    resource: str = must("Which.")


class DownwardFile(Part):
    """A file with something of the object itself."""

    fieldRef: FieldReference | None = said("A field.", **WHOLE)
    mode: Int32 | None = said("The file's mode.")
    path: str = must("The file's path.")
    resourceFieldRef: ResourceReference | None = said("A resource.", **WHOLE)


class DownwardApiVolume(Part):
    """What the object says of itself, as files on a disk."""

    fields: list[DownwardFile] | None = said("The files.")
    volumeLabel: str | None = said("The file system's label.")


class EmptyDisk(Part):
    """An empty disk that goes with the VMI."""

    capacity: Quantity = must("How large.")


class HostDisk(Part):
    """A file of the host's."""

    capacity: Quantity | None = said("How large, where it is made.")
    path: str = must("Its path.")
    shared: bool | None = said("Each host has it.")
    type: str = must("Disk: is there; DiskOrCreate: made where it is not.")


class ServiceAccountVolume(Part):
    """A service account's token on a disk."""

    serviceAccountName: str | None = said("The account.")


class Sysprep(Part):
    """Windows' answer file."""

    configMap: LocalReference | None = said("A ConfigMap with it.", **WHOLE)
    secret: LocalReference | None = said("A Secret with it.", **WHOLE)


class Volume(Part):
    """What fills the disk of the same name; exactly one source."""

    cloudInitConfigDrive: CloudInit | None = said("cloud-init's data as a config drive.")
    cloudInitNoCloud: CloudInit | None = said("cloud-init's data for its NoCloud source.")
    configMap: ConfigMapVolume | None = said("A ConfigMap's keys as files.", **WHOLE)
    containerDisk: ContainerDisk | None = said("A disk out of a container image.")
    containerPath: ContainerPath | None = said("A path of the launcher's container.")
    dataVolume: DataVolumeVolume | None = said("A DataVolume's claim.")
    downwardAPI: DownwardApiVolume | None = said("What the object says of itself.")
    downwardMetrics: Empty | None = said("The host's metrics.")
    emptyDisk: EmptyDisk | None = said("An empty disk that goes with the VMI.")
    ephemeral: EphemeralVolume | None = said("A claim whose changes go with the VMI.")
    hostDisk: HostDisk | None = said("A file of the host's.")
    memoryDump: Claim | None = said("Where the guest's memory is dumped.")
    name: str = must("Its disk's or file system's name.")
    persistentVolumeClaim: Claim | None = said("A claim.")
    secret: SecretVolume | None = said("A Secret's keys as files.")
    serviceAccount: ServiceAccountVolume | None = said("A service account's token.")
    sysprep: Sysprep | None = said("Windows' answer file.")


class UtilityVolume(Part):
    """A claim for the machine, which the guest does not see."""

    claimName: str = must("The claim.")
    name: str = must("A name for it.")
    readOnly: bool | None = said("It is only read.")
    type: str | None = said("What it is for.")


class MultusNetwork(Part):
    """A NetworkAttachmentDefinition."""

    default: bool | None = said("In place of the pod's network.")
    networkName: str = must("Its name, or namespace/name.")


class PodNetwork(Part):
    """The network of pods."""

    vmIPv6NetworkCIDR: str | None = said("The guest's IPv6 network, with masquerade.")
    vmNetworkCIDR: str | None = said("The guest's network, with masquerade (10.0.2.0/24).")


class ClaimedNetwork(Part):
    """A network by a claim on devices."""

    claimName: str | None = said("One of resourceClaims.")
    requestName: str | None = said("The claim's request.")


class Network(Part):
    """What the interface of the same name joins; exactly one source."""

    multus: MultusNetwork | None = said("A NetworkAttachmentDefinition.")
    name: str = must("Its interface's name.")
    pod: PodNetwork | None = said("The network of pods.")
    resourceClaim: ClaimedNetwork | None = said("A claim on devices.")


class AccessSecret(Part):
    """A Secret whose values are keys or passwords."""

    secretName: str = must("Its name.")


class AccessSource(Part):
    """Where keys or passwords come from."""

    secret: AccessSecret | None = said("A Secret.")


class AgentUsers(Part):
    """By the guest's agent, for some users."""

    users: list[str] = must("Users of the guest.", **{"x-kubernetes-list-type": "set"})


class KeyPropagation(Part):
    """How keys reach the guest; exactly one way."""

    configDrive: Empty | None = said("With cloud-init's config drive.")
    noCloud: Empty | None = said("With cloud-init's NoCloud data.")
    qemuGuestAgent: AgentUsers | None = said("By the guest's agent, also while it runs.")


class SshPublicKey(Part):
    """Keys that may log in."""

    propagationMethod: KeyPropagation = must("How they reach the guest.")
    source: AccessSource = must("Where they come from.")


class PasswordPropagation(Part):
    """How passwords reach the guest."""

    qemuGuestAgent: Empty | None = said("By the guest's agent.")


class UserPassword(Part):
    """Passwords of users; the Secret's keys are their names."""

    propagationMethod: PasswordPropagation = must("How they reach the guest.")
    source: AccessSource = must("Where they come from.")


class AccessCredential(Part):
    """Who may log in: sshPublicKey or userPassword."""

    sshPublicKey: SshPublicKey | None = said("Keys.")
    userPassword: UserPassword | None = said("Passwords.")
