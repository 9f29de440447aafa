"""DataVolumes that a VM brings: CDI's type, by its names."""

from typing import Literal

from virtbus.kubebridge.core.kubevirt.part import Empty, Metadata, Part, Quantity, must, said
from virtbus.kubebridge.core.kubevirt.pods import ATOMIC, WHOLE, LabelSelector


class Checkpoint(Part):
    """A step of a copy in several."""

    current: str = must("This one.")
    previous: str = must("The one before.")


class DataSource(Part):
    """What a claim is filled from."""

    apiGroup: str | None = said("Its group.")
    kind: str = must("Its kind.")
    name: str = must("Its name.")


class DataSourceReference(DataSource):
    """What a claim is filled from, also of another namespace."""

    namespace: str | None = said("Its namespace.")


class ClaimResources(Part):
    """How large a claim is."""

    limits: dict[str, Quantity] | None = said("At most.")
    requests: dict[str, Quantity] | None = said("At least: storage.")


class Storage(Part):
    """A claim whose rest is found by its storage class."""

    accessModes: list[str] | None = said("ReadWriteOnce, ReadWriteMany, ...", **ATOMIC)
    dataSource: DataSource | None = said("What it is filled from.", **WHOLE)
    dataSourceRef: DataSourceReference | None = said("What it is filled from.")
    resources: ClaimResources | None = said("How large it is.")
    selector: LabelSelector | None = said("Which volumes would do.", **WHOLE)
    storageClassName: str | None = said("Its storage class.")
    volumeMode: str | None = said("Filesystem or Block.")
    volumeName: str | None = said("This very volume.")


class ClaimSpec(Storage):
    """A claim as Kubernetes has it."""

    volumeAttributesClassName: str | None = said("Its class of attributes.")


class HttpSource(Part):
    """From a web server."""

    certConfigMap: str | None = said("A ConfigMap with its CA.")
    extraHeaders: list[str] | None = said("More headers.")
    secretExtraHeaders: list[str] | None = said("Secrets with more headers.")
    secretRef: str | None = said("A Secret with the login.")
    url: str = must("Where.")


class GcsSource(Part):
    """From Google's storage."""

    secretRef: str | None = said("A Secret with the login.")
    url: str = must("Where.")


class S3Source(GcsSource):
    """From a bucket."""

    certConfigMap: str | None = said("A ConfigMap with its CA.")


class ImageioSource(S3Source):
    """From oVirt."""

    diskId: str = must("Which disk.")
    insecureSkipVerify: bool | None = said("Whoever answers is believed.")


class NamedSource(Part):
    """From another object."""

    name: str = must("Its name.")
    namespace: str = must("Its namespace.")


class Platform(Part):
    """For which machine."""

    architecture: str | None = said("Its architecture.")


class RegistrySource(Part):
    """From a container registry."""

    certConfigMap: str | None = said("A ConfigMap with its CA.")
    imageStream: str | None = said("An image stream.")
    platform: Platform | None = said("For which machine.")
    pullMethod: str | None = said("pod or node.")
    secretRef: str | None = said("A Secret with the login.")
    url: str | None = said("Where.")


class VddkSource(Part):
    """From VMware."""

    backingFile: str | None = said("Which disk.")
    extraArgs: str | None = said("A ConfigMap with more arguments.")
    initImageURL: str | None = said("An image with VMware's library.")
    secretRef: str | None = said("A Secret with the login.")
    thumbprint: str | None = said("Of the server's certificate.")
    url: str | None = said("Where.")
    uuid: str | None = said("Which machine.")


class Source(Part):
    """What fills it; exactly one."""

    blank: Empty | None = said("Nothing.")
    gcs: GcsSource | None = said("Google's storage.")
    http: HttpSource | None = said("A web server.")
    imageio: ImageioSource | None = said("oVirt.")
    pvc: NamedSource | None = said("Another claim.")
    registry: RegistrySource | None = said("A container registry.")
    s3: S3Source | None = said("A bucket.")
    snapshot: NamedSource | None = said("A snapshot.")
    upload: Empty | None = said("What a client sends.")
    vddk: VddkSource | None = said("VMware.")


class SourceReference(Part):
    """A DataSource."""

    kind: str = must("DataSource.")
    name: str = must("Its name.")
    namespace: str | None = said("Its namespace.")


class DataVolumeSpec(Part):
    """A claim and what fills it."""

    checkpoints: list[Checkpoint] | None = said("Steps of a copy in several.")
    contentType: Literal["kubevirt", "archive"] | None = said("A disk, or files.")
    finalCheckpoint: bool | None = said("The last step.")
    preallocation: bool | None = said("All its room is taken at once.")
    priorityClassName: str | None = said("Of the pods that fill it.")
    pvc: ClaimSpec | None = said("The claim.")
    source: Source | None = said("What fills it.")
    sourceRef: SourceReference | None = said("What fills it, by a DataSource.")
    storage: Storage | None = said("The claim; its rest is found by its storage class.")


class DataVolumeTemplate(Part):
    """A DataVolume that is made with the VM, and goes with it."""

    apiVersion: str | None = said("Its version.")
    kind: str | None = said("DataVolume.")
    metadata: Metadata | None = said("Its name, labels and annotations.", nullable=True)
    spec: DataVolumeSpec = must("The claim and what fills it.")
    status: Empty | None = said("Not in use.", nullable=True)
