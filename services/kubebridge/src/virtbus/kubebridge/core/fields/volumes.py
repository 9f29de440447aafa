"""Declares the fields `volumes`, `networks` and `accessCredentials`."""

from virtbus.kubebridge.core.fields.row import Field, FieldType, below, ignored, mapped, refused
from virtbus.kubebridge.core.objects.quantity import whole

VOLUMES, NETWORKS, KEYS = "volumes[]", "networks[]", "accessCredentials[].sshPublicKey"
TO, TO_NETWORK = "spec.volumes[]", "spec.networks[]"
CLAIMS = "storage claims are not supported yet"
CONTAINER = "use a containerDisk, or an emptyDisk for data that may be deleted with the VM"
WAITS = "read at the VMI's start; the start waits for it"
BOUNDS = "128 keys of up to 64 characters, 512 KiB in all"
AGENT = "the guest agent is not used to write keys or passwords"


def _seed(kind: str, ours: str, how: str) -> tuple[Field, ...]:
    here, to = f"{VOLUMES}.{kind}", f"{TO}.{ours}"
    rows = [below(here, how, to=to)]
    for name, our_name in (("userData", "user_data"), ("networkData", "network_data")):
        rows += [
            mapped(f"{here}.{name}", FieldType.TEXT, f"{to}.{our_name}"),
            mapped(
                f"{here}.{name}Base64",
                FieldType.TEXT,
                f"{to}.{our_name}_base64",
                "text, or gzipped text",
            ),
        ]
    for name, keys in (
        ("secretRef", "`userdata` or `userData` (and `networkdata`, `networkData`)"),
        ("networkDataSecretRef", "`networkdata` or `networkData`"),
    ):
        rows.append(below(f"{here}.{name}", f"the Secret's key {keys}, read at the VMI's start"))
        rows.append(mapped(f"{here}.{name}.name", FieldType.TEXT, "", WAITS))
    return tuple(rows)


def _files(kind: str, name: str) -> tuple[Field, ...]:
    here = f"{VOLUMES}.{kind}"
    return (
        below(here, "a read-only ISO with a file for each key", to=f"{TO}.files"),
        mapped(f"{here}.{name}", FieldType.TEXT, "", f"{WAITS}; {BOUNDS}"),
        mapped(
            f"{here}.optional",
            FieldType.FLAG,
            "",
            "if true and the object is missing, the disk is empty",
        ),
        mapped(
            f"{here}.volumeLabel",
            FieldType.TEXT,
            f"{TO}.files.volume_label",
            "the default is `cfgdata`",
            pattern=r"[A-Za-z0-9_-]{1,16}",
            instead="write 1-16 characters of A-Z, a-z, 0-9, '_' and '-'",
        ),
    )


CONTENTS = (
    below(VOLUMES, to=TO),
    mapped(f"{VOLUMES}.name", FieldType.TEXT, f"{TO}.name"),
    below(f"{VOLUMES}.containerDisk"),
    mapped(f"{VOLUMES}.containerDisk.image", FieldType.TEXT, f"{TO}.container_disk.image"),
    mapped(f"{VOLUMES}.containerDisk.path", FieldType.TEXT, f"{TO}.container_disk.path"),
    mapped(
        f"{VOLUMES}.containerDisk.imagePullPolicy",
        FieldType.TEXT,
        f"{TO}.container_disk.image_pull_policy",
        values=("Always", "IfNotPresent", "Never"),
        instead="write Always, IfNotPresent or Never",
    ),
    mapped(
        f"{VOLUMES}.containerDisk.imagePullSecret",
        FieldType.TEXT,
        "",
        "the login for the image's registry, from a Secret of the type"
        f" kubernetes.io/dockerconfigjson; {WAITS}",
    ),
    below(f"{VOLUMES}.emptyDisk"),
    mapped(
        f"{VOLUMES}.emptyDisk.capacity", FieldType.QUANTITY, f"{TO}.empty_disk.capacity", make=whole
    ),
    *_seed("cloudInitNoCloud", "cloud_init_no_cloud", "a seed with the label `cidata`"),
    *_seed(
        "cloudInitConfigDrive",
        "cloud_init_config_drive",
        "a seed with the label `config-2`; its network data is OpenStack's network_data.json",
    ),
    *_files("configMap", "name"),
    *_files("secret", "secretName"),
    below(
        f"{VOLUMES}.sysprep",
        "an ISO with the label `unattendCD` and `autounattend.xml` or `unattend.xml` among its"
        " files; attach it as a cdrom",
        to=f"{TO}.files",
    ),
    below(f"{VOLUMES}.sysprep.configMap"),
    mapped(f"{VOLUMES}.sysprep.configMap.name", FieldType.TEXT, "", f"{WAITS}; {BOUNDS}"),
    below(f"{VOLUMES}.sysprep.secret"),
    mapped(f"{VOLUMES}.sysprep.secret.name", FieldType.TEXT, "", f"{WAITS}; {BOUNDS}"),
    *(
        refused(f"{VOLUMES}.{name}", CLAIMS, CONTAINER)
        for name in ("persistentVolumeClaim", "dataVolume", "ephemeral", "memoryDump")
    ),
    below(f"{VOLUMES}.hostDisk", "a raw disk in a file of the node"),
    mapped(
        f"{VOLUMES}.hostDisk.path",
        FieldType.TEXT,
        f"{TO}.host_disk.path",
        "below a directory that the nodes' setting `directories_allowed` opens to the namespace",
    ),
    mapped(
        f"{VOLUMES}.hostDisk.type",
        FieldType.TEXT,
        "",
        "`Disk`: the file exists; `DiskOrCreate`: the node makes it with the capacity",
        values=("Disk", "DiskOrCreate"),
        instead="write Disk or DiskOrCreate",
    ),
    mapped(
        f"{VOLUMES}.hostDisk.capacity", FieldType.QUANTITY, f"{TO}.host_disk.capacity", make=whole
    ),
    ignored(f"{VOLUMES}.hostDisk.shared", "a VM with such a disk stays on its node"),
    refused(f"{VOLUMES}.containerPath", "there is no pod", CONTAINER),
    refused(
        f"{VOLUMES}.downwardAPI",
        "a VM's own fields cannot be a disk",
        "write what the guest needs into cloud-init's user data, or a ConfigMap",
    ),
    refused(
        f"{VOLUMES}.serviceAccount",
        "a VM has no identity in the cluster",
        "put a token into a Secret, and use a secret volume",
    ),
    refused(f"{VOLUMES}.downwardMetrics", "the host's metrics stay on the host", "leave it out"),
    refused("utilityVolumes[]", CLAIMS, CONTAINER),
)

NETS = (
    below(NETWORKS, to=TO_NETWORK),
    mapped(f"{NETWORKS}.name", FieldType.TEXT, f"{TO_NETWORK}.name"),
    below(
        f"{NETWORKS}.pod",
        "the nodes' network `default`",
        to=f"{TO_NETWORK}.network",
        make=lambda _: "default",
    ),
    mapped(
        f"{NETWORKS}.pod.vmNetworkCIDR",
        FieldType.TEXT,
        "",
        "the guest's own network with masquerade; the default is `10.0.2.0/24`",
    ),
    mapped(
        f"{NETWORKS}.pod.vmIPv6NetworkCIDR",
        FieldType.TEXT,
        "",
        "as vmNetworkCIDR, if the nodes' network has IPv6; the default is `fd10:0:2::/120`",
    ),
    below(f"{NETWORKS}.multus"),
    mapped(
        f"{NETWORKS}.multus.networkName",
        FieldType.TEXT,
        "",
        "a NetworkAttachmentDefinition of the VM's namespace, or the name of a network of the bus"
        " (ADR 0066)",
        pattern=r"([a-z0-9][a-z0-9-]{0,62}/)?[a-z0-9][a-z0-9.-]{0,252}",
        instead="write the name of a NetworkAttachmentDefinition of the VM's namespace",
    ),
    refused(
        f"{NETWORKS}.multus.default",
        "a VM has no pod whose network it could replace",
        "leave it out, and do not name a pod network",
    ),
    refused(f"{NETWORKS}.resourceClaim", "no device is passed through", "use pod or multus"),
)

CREDENTIALS = (
    below("accessCredentials[]"),
    below(KEYS),
    below(f"{KEYS}.source"),
    below(f"{KEYS}.source.secret"),
    mapped(
        f"{KEYS}.source.secret.secretName",
        FieldType.TEXT,
        "",
        "each line of the Secret's values becomes a key in the seed; read at the VMI's start",
    ),
    below(f"{KEYS}.propagationMethod"),
    below(f"{KEYS}.propagationMethod.noCloud"),
    below(f"{KEYS}.propagationMethod.configDrive"),
    refused(f"{KEYS}.propagationMethod.qemuGuestAgent", AGENT, "write noCloud: {}"),
    refused("accessCredentials[].userPassword", AGENT, "set passwords with cloud-init"),
)

ALL = (*CONTENTS, *NETS, *CREDENTIALS)
