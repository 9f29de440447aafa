"""Defines models of volumes, networks and access credentials."""

from typing import Annotated

from pydantic import Field

from virtbus.documents.crds.models.part import Empty, Int32, Part, Quantity, must, said
from virtbus.documents.crds.models.pods import WHOLE, LocalReference


class CloudInit(Part):
    """cloud-init's data: inline, in Base64, or from Secrets."""

    networkData: str | None = said("Network configuration.")
    networkDataBase64: str | None = said("Network configuration in Base64.")
    networkDataSecretRef: LocalReference | None = said(
        "Secret with the network configuration under the key networkdata.", **WHOLE
    )
    secretRef: LocalReference | None = said(
        "Secret with the user data under the key userdata.", **WHOLE
    )
    userData: str | None = said("User data, for example a document that begins with #cloud-config.")
    userDataBase64: str | None = said("User data in Base64.")


class ConfigMapVolume(Part):
    """A ConfigMap whose keys are files on a disk."""

    name: str | None = said("Name of the ConfigMap.")
    optional: bool | None = said("If true, the ConfigMap may be absent.")
    volumeLabel: str | None = said("Label of the file system.")


class SecretVolume(Part):
    """A Secret whose keys are files on a disk."""

    optional: bool | None = said("If true, the Secret may be absent.")
    secretName: str | None = said("Name of the Secret.")
    volumeLabel: str | None = said("Label of the file system.")


class ContainerDisk(Part):
    """A disk from a container image. Changes are lost when the VirtualMachineInstance ends."""

    image: str = must("Name of the container image.")
    imagePullPolicy: str | None = said(
        "Pull policy: Always (the default for :latest), IfNotPresent or Never."
    )
    imagePullSecret: str | None = said("Name of a Secret with the login for the registry.")
    path: str | None = said("Path of the disk in the image. The default is the only file in /disk.")


class ContainerPath(Part):
    """A path in the launcher's container."""

    path: Annotated[str, Field(max_length=4096)] = must("Path from / on.")
    readOnly: bool | None = said("Must be true.")


class DataVolumeVolume(Part):
    """A volume from a DataVolume."""

    hotpluggable: bool | None = said("If true, the volume can be unplugged.")
    name: str = must("Name of the DataVolume.")


class Claim(Part):
    """A volume from a PersistentVolumeClaim."""

    claimName: str = must("Name of the PersistentVolumeClaim.")
    hotpluggable: bool | None = said("If true, the volume can be unplugged.")
    readOnly: bool | None = said("If true, the guest cannot write to the volume.")


class EphemeralClaim(Part):
    """A PersistentVolumeClaim that is only read."""

    claimName: str = must("Name of the PersistentVolumeClaim.")
    readOnly: bool | None = said("If true, the claim is only read.")


class EphemeralVolume(Part):
    """A PersistentVolumeClaim with an overlay that is lost when the VMI ends."""

    persistentVolumeClaim: EphemeralClaim | None = said("PersistentVolumeClaim below the overlay.")


class FieldReference(Part):
    """A reference to a field of the object."""

    apiVersion: str | None = said("API version of the object.")
    fieldPath: str = must("Path of the field.")


class ResourceReference(Part):
    """A reference to a resource of the object."""

    containerName: str | None = said("Name of the container.")
    divisor: Quantity | None = said("Unit of the value.")
    resource: str = must("Name of the resource, such as limits.memory.")


class DownwardFile(Part):
    """A file with a value from the object itself."""

    fieldRef: FieldReference | None = said("Field whose value the file has.", **WHOLE)
    mode: Int32 | None = said("Mode of the file.")
    path: str = must("Relative path of the file.")
    resourceFieldRef: ResourceReference | None = said("Resource whose value the file has.", **WHOLE)


class DownwardApiVolume(Part):
    """Values from the object itself as files on a disk."""

    fields: list[DownwardFile] | None = said("Files of the volume.")
    volumeLabel: str | None = said("Label of the file system.")


class EmptyDisk(Part):
    """An empty disk. Its content is lost when the VirtualMachineInstance ends."""

    capacity: Quantity = must("Size of the disk.")


class HostDisk(Part):
    """A disk image on the host."""

    capacity: Quantity | None = said("Size of the disk image if it is created.")
    path: str = must("Path of the disk image.")
    shared: bool | None = said("True if all hosts share the path.")
    type: str = must("Disk expects an existing image. DiskOrCreate creates a missing one.")


class ServiceAccountVolume(Part):
    """A service account's token as a file on a disk."""

    serviceAccountName: str | None = said("Name of the service account.")


class Sysprep(Part):
    """A disk with an answer file for Windows setup."""

    configMap: LocalReference | None = said("ConfigMap with the answer file.", **WHOLE)
    secret: LocalReference | None = said("Secret with the answer file.", **WHOLE)


class Volume(Part):
    """The content of the disk of the same name. Exactly one source is given."""

    cloudInitConfigDrive: CloudInit | None = said("cloud-init's data as a config drive.")
    cloudInitNoCloud: CloudInit | None = said("cloud-init's data for its NoCloud data source.")
    configMap: ConfigMapVolume | None = said("Keys of a ConfigMap as files on a disk.", **WHOLE)
    containerDisk: ContainerDisk | None = said("Disk from a container image.")
    containerPath: ContainerPath | None = said("Path in the launcher's container.")
    dataVolume: DataVolumeVolume | None = said("Disk from a DataVolume.")
    downwardAPI: DownwardApiVolume | None = said(
        "Values from the object itself as files on a disk."
    )
    downwardMetrics: Empty | None = said("Disk on which the guest reads metrics of its host.")
    emptyDisk: EmptyDisk | None = said(
        "Empty disk whose content is lost when the VirtualMachineInstance ends."
    )
    ephemeral: EphemeralVolume | None = said(
        "PersistentVolumeClaim with an overlay that is lost when the VirtualMachineInstance ends."
    )
    hostDisk: HostDisk | None = said("Disk image on the host.")
    memoryDump: Claim | None = said(
        "PersistentVolumeClaim that receives a dump of the guest's memory."
    )
    name: str = must("Name of the volume, and of its disk or file system.")
    persistentVolumeClaim: Claim | None = said("Disk from a PersistentVolumeClaim.")
    secret: SecretVolume | None = said("Keys of a Secret as files on a disk.")
    serviceAccount: ServiceAccountVolume | None = said(
        "Token of a service account as a file on a disk."
    )
    sysprep: Sysprep | None = said("Disk with an answer file for Windows setup.")


class UtilityVolume(Part):
    """A volume that the launcher uses and the guest does not see."""

    claimName: str = must("Name of the PersistentVolumeClaim.")
    name: str = must("Name of the volume.")
    readOnly: bool | None = said("If true, the volume is only read.")
    type: str | None = said("Purpose of the volume.")


class MultusNetwork(Part):
    """A secondary network from a NetworkAttachmentDefinition."""

    default: bool | None = said("If true, this network replaces the pod network.")
    networkName: str = must("Name of the NetworkAttachmentDefinition, or namespace/name.")


class PodNetwork(Part):
    """The cluster's pod network."""

    vmIPv6NetworkCIDR: str | None = said("IPv6 network of the guest behind masquerade.")
    vmNetworkCIDR: str | None = said(
        "IPv4 network of the guest behind masquerade. The default is 10.0.2.0/24."
    )


class ClaimedNetwork(Part):
    """A network device from a ResourceClaim."""

    claimName: str | None = said("Name of an entry in resourceClaims.")
    requestName: str | None = said("Name of the request in the ResourceClaim.")


class Network(Part):
    """The network of the interface of the same name. Exactly one source is given."""

    multus: MultusNetwork | None = said("Secondary network from a NetworkAttachmentDefinition.")
    name: str = must("Name of the network and of its interface.")
    pod: PodNetwork | None = said("The cluster's pod network.")
    resourceClaim: ClaimedNetwork | None = said("Network device from a ResourceClaim.")


class AccessSecret(Part):
    """A Secret with keys or passwords."""

    secretName: str = must("Name of the Secret.")


class AccessSource(Part):
    """The source of keys or passwords."""

    secret: AccessSecret | None = said("Secret with the keys or passwords.")


class AgentUsers(Part):
    """Users whose keys the guest agent writes."""

    users: list[str] = must("Names of users in the guest.", **{"x-kubernetes-list-type": "set"})


class KeyPropagation(Part):
    """The way in which keys reach the guest. Exactly one is given."""

    configDrive: Empty | None = said("Write the keys into cloud-init's config drive.")
    noCloud: Empty | None = said("Write the keys into cloud-init's NoCloud data.")
    qemuGuestAgent: AgentUsers | None = said(
        "Let the QEMU guest agent write the keys, also while the guest runs."
    )


class SshPublicKey(Part):
    """SSH public keys that may log in to the guest."""

    propagationMethod: KeyPropagation = must("The way in which the keys reach the guest.")
    source: AccessSource = must("Source of the keys.")


class PasswordPropagation(Part):
    """The way in which passwords reach the guest."""

    qemuGuestAgent: Empty | None = said("Let the QEMU guest agent set the passwords.")


class UserPassword(Part):
    """Passwords of users. The Secret's keys are the names of the users."""

    propagationMethod: PasswordPropagation = must("The way in which the passwords reach the guest.")
    source: AccessSource = must("Source of the passwords.")


class AccessCredential(Part):
    """Credentials for logging in to the guest: sshPublicKey or userPassword."""

    sshPublicKey: SshPublicKey | None = said("SSH public keys.")
    userPassword: UserPassword | None = said("Passwords of users.")
