"""Defines models of CDI's DataVolume, which a VirtualMachine can have as a template."""

from typing import Literal

from virtbus.documents.crds.models.part import Empty, Metadata, Part, Quantity, must, said
from virtbus.documents.crds.models.pods import ATOMIC, WHOLE, LabelSelector


class Checkpoint(Part):
    """A step of a multi-stage import."""

    current: str = must("Id of this checkpoint.")
    previous: str = must("Id of the previous checkpoint.")


class DataSource(Part):
    """An object whose data fills a claim."""

    apiGroup: str | None = said("API group of the object.")
    kind: str = must("Kind of the object.")
    name: str = must("Name of the object.")


class DataSourceReference(DataSource):
    """An object whose data fills a claim. It may be in another namespace."""

    namespace: str | None = said("Namespace of the object.")


class ClaimResources(Part):
    """The size of a claim."""

    limits: dict[str, Quantity] | None = said("Largest size.")
    requests: dict[str, Quantity] | None = said("Smallest size, under the key storage.")


class Storage(Part):
    """A claim whose missing fields the StorageProfile gives."""

    accessModes: list[str] | None = said(
        "Access modes, such as ReadWriteOnce and ReadWriteMany.", **ATOMIC
    )
    dataSource: DataSource | None = said("Object whose data fills the claim.", **WHOLE)
    dataSourceRef: DataSourceReference | None = said(
        "Object whose data fills the claim. It may be in another namespace."
    )
    resources: ClaimResources | None = said("Size of the claim.")
    selector: LabelSelector | None = said("Selects PersistentVolumes by labels.", **WHOLE)
    storageClassName: str | None = said("Name of the StorageClass.")
    volumeMode: str | None = said("Volume mode: Filesystem or Block.")
    volumeName: str | None = said("Name of the PersistentVolume to bind.")


class ClaimSpec(Storage):
    """The specification of a PersistentVolumeClaim."""

    volumeAttributesClassName: str | None = said("Name of the VolumeAttributesClass.")


class HttpSource(Part):
    """Import from an HTTP server."""

    certConfigMap: str | None = said("ConfigMap with the CA certificate of the server.")
    extraHeaders: list[str] | None = said("Additional headers of the request.")
    secretExtraHeaders: list[str] | None = said("Secrets with additional headers of the request.")
    secretRef: str | None = said("Secret with the login.")
    url: str = must("URL of the data.")


class GcsSource(Part):
    """Import from Google Cloud Storage."""

    secretRef: str | None = said("Secret with the login.")
    url: str = must("URL of the data.")


class S3Source(GcsSource):
    """Import from an S3 bucket."""

    certConfigMap: str | None = said("ConfigMap with the CA certificate of the server.")


class ImageioSource(S3Source):
    """Import from oVirt."""

    diskId: str = must("Id of the disk.")
    insecureSkipVerify: bool | None = said(
        "If true, the certificate of the server is not verified."
    )


class NamedSource(Part):
    """Copy of another object."""

    name: str = must("Name of the object.")
    namespace: str = must("Namespace of the object.")


class Platform(Part):
    """The platform of a container image."""

    architecture: str | None = said("CPU architecture of the image.")


class RegistrySource(Part):
    """Import from a container registry."""

    certConfigMap: str | None = said("ConfigMap with the CA certificate of the registry.")
    imageStream: str | None = said("Name of an ImageStream.")
    platform: Platform | None = said("Platform of the image.")
    pullMethod: str | None = said("Place of the pull: pod or node.")
    secretRef: str | None = said("Secret with the login.")
    url: str | None = said("URL of the image.")


class VddkSource(Part):
    """Import from VMware by the VDDK library."""

    backingFile: str | None = said("File of the disk.")
    extraArgs: str | None = said("ConfigMap with additional arguments for VDDK.")
    initImageURL: str | None = said("Container image with the VDDK library.")
    secretRef: str | None = said("Secret with the login.")
    thumbprint: str | None = said("Thumbprint of the server's certificate.")
    url: str | None = said("URL of the server.")
    uuid: str | None = said("UUID of the machine.")


class Source(Part):
    """The data that fills a claim. Exactly one source is given."""

    blank: Empty | None = said("An empty disk.")
    gcs: GcsSource | None = said("Import from Google Cloud Storage.")
    http: HttpSource | None = said("Import from an HTTP server.")
    imageio: ImageioSource | None = said("Import from oVirt.")
    pvc: NamedSource | None = said("Copy of another PersistentVolumeClaim.")
    registry: RegistrySource | None = said("Import from a container registry.")
    s3: S3Source | None = said("Import from an S3 bucket.")
    snapshot: NamedSource | None = said("Copy of a VolumeSnapshot.")
    upload: Empty | None = said("Upload by a client.")
    vddk: VddkSource | None = said("Import from VMware by the VDDK library.")


class SourceReference(Part):
    """A reference to a DataSource."""

    kind: str = must("Kind of the reference: DataSource.")
    name: str = must("Name of the DataSource.")
    namespace: str | None = said("Namespace of the DataSource.")


class DataVolumeSpec(Part):
    """A claim and the data that fills it."""

    checkpoints: list[Checkpoint] | None = said("Checkpoints of a multi-stage import.")
    contentType: Literal["kubevirt", "archive"] | None = said(
        "Type of the content: kubevirt (a disk image) or archive (files)."
    )
    finalCheckpoint: bool | None = said("True if the last checkpoint is the final one.")
    preallocation: bool | None = said("Allocate all space of the claim at once.")
    priorityClassName: str | None = said("PriorityClass of the pods that fill the claim.")
    pvc: ClaimSpec | None = said("Specification of the PersistentVolumeClaim.")
    source: Source | None = said("Data that fills the claim.")
    sourceRef: SourceReference | None = said("DataSource with the data that fills the claim.")
    storage: Storage | None = said("Claim whose missing fields the StorageProfile gives.")


class DataVolumeTemplate(Part):
    """A DataVolume that is created and deleted with the VirtualMachine."""

    apiVersion: str | None = said("API version of the DataVolume.")
    kind: str | None = said("Kind of the object: DataVolume.")
    metadata: Metadata | None = said("Metadata of the DataVolume.", nullable=True)
    spec: DataVolumeSpec = must("Specification of the DataVolume.")
    status: Empty | None = said("Not used.", nullable=True)
