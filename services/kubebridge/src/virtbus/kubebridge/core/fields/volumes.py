"""The contents of disks, the networks of NICs, and keys: `spec.volumes` and its like."""

import base64
import binascii

from virtbus.kubebridge.core.fields.row import Field, Kind, below, later, mapped, refused
from virtbus.kubebridge.core.quantity import whole

VOLUMES, NETWORKS, KEYS = "volumes[]", "networks[]", "accessCredentials[].sshPublicKey"
TO, TO_NETWORK = "spec.volumes[]", "spec.networks[]"
CLAIMS = "claims of storage are not there yet"
CONTAINER = "use a containerDisk, or an emptyDisk for data that may go with the VM"
AGENT = "nothing is written into a running guest by its agent"


def plain_text(value: str) -> str:
    """The text that Base64 stands for.

    Raises:
        ValueError: it is no Base64, or of no text.
    """
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        msg = "must be the Base64 of a text in UTF-8"
        raise ValueError(msg) from None


def _pod(_: object) -> str:
    return "default"


def _seed() -> tuple[Field, ...]:
    """NoCloud, inline or from Secrets."""
    here, to = f"{VOLUMES}.cloudInitNoCloud", f"{TO}.cloud_init_no_cloud"
    rows = [below(here, "a seed with cloud-init's data")]
    for name, ours in (("userData", "user_data"), ("networkData", "network_data")):
        at = f"{to}.{ours}"
        rows += [
            mapped(f"{here}.{name}", Kind.TEXT, at),
            mapped(f"{here}.{name}Base64", Kind.TEXT, at, make=plain_text),
        ]
    for name, keys in (
        ("secretRef", "`userdata` or `userData` (and `networkdata`, `networkData`)"),
        ("networkDataSecretRef", "`networkdata` or `networkData`"),
    ):
        rows.append(below(f"{here}.{name}", f"the Secret's key {keys}, read at the VMI's start"))
        rows.append(mapped(f"{here}.{name}.name", Kind.TEXT))
    return tuple(rows)


CONTENTS = (
    below(VOLUMES, to=TO),
    mapped(f"{VOLUMES}.name", Kind.TEXT, f"{TO}.name"),
    below(f"{VOLUMES}.containerDisk"),
    mapped(f"{VOLUMES}.containerDisk.image", Kind.TEXT, f"{TO}.container_disk.image"),
    mapped(f"{VOLUMES}.containerDisk.path", Kind.TEXT, f"{TO}.container_disk.path"),
    mapped(
        f"{VOLUMES}.containerDisk.imagePullPolicy",
        Kind.TEXT,
        f"{TO}.container_disk.image_pull_policy",
        values=("Always", "IfNotPresent", "Never"),
        instead="write Always, IfNotPresent or Never",
    ),
    later(
        f"{VOLUMES}.containerDisk.imagePullSecret",
        "a VM brings no login to a registry",
        "put the login into the nodes' registry-auth.json (docs/howto/container-disks.md)",
    ),
    below(f"{VOLUMES}.emptyDisk"),
    mapped(f"{VOLUMES}.emptyDisk.capacity", Kind.QUANTITY, f"{TO}.empty_disk.capacity", make=whole),
    *_seed(),
    later(f"{VOLUMES}.cloudInitConfigDrive", "there is no config drive", "use cloudInitNoCloud"),
    later(
        f"{VOLUMES}.configMap",
        "a ConfigMap is not made a disk",
        "write the files by cloud-init (`write_files:`)",
    ),
    later(
        f"{VOLUMES}.secret",
        "a Secret is not made a disk",
        "write the files by cloud-init (`write_files:`), from cloudInitNoCloud.secretRef",
    ),
    *(
        refused(f"{VOLUMES}.{name}", CLAIMS, CONTAINER)
        for name in ("persistentVolumeClaim", "dataVolume", "ephemeral", "memoryDump")
    ),
    refused(f"{VOLUMES}.hostDisk", "no file of a host becomes a disk", CONTAINER),
    refused(f"{VOLUMES}.containerPath", "there is no pod", CONTAINER),
    refused(
        f"{VOLUMES}.downwardAPI",
        "a VM's own fields are not made a disk",
        "write what the guest needs into cloud-init's user data",
    ),
    refused(
        f"{VOLUMES}.serviceAccount",
        "a VM has no identity in the cluster",
        "bring a token in a Secret, by cloudInitNoCloud.secretRef",
    ),
    refused(f"{VOLUMES}.sysprep", "Windows' answer files are not made a disk", "leave it out"),
    refused(f"{VOLUMES}.downwardMetrics", "the host's metrics stay on the host", "leave it out"),
    refused("utilityVolumes[]", CLAIMS, CONTAINER),
)

NETS = (
    below(NETWORKS, to=TO_NETWORK),
    mapped(f"{NETWORKS}.name", Kind.TEXT, f"{TO_NETWORK}.name"),
    below(
        f"{NETWORKS}.pod",
        "the nodes' network `default`",
        to=f"{TO_NETWORK}.network",
        make=_pod,
    ),
    refused(
        f"{NETWORKS}.pod.vmNetworkCIDR",
        "a guest has an address of its node's network",
        "leave it out; the subnet is a setting of the nodes",
    ),
    refused(f"{NETWORKS}.pod.vmIPv6NetworkCIDR", "guests have IPv4", "leave it out"),
    below(f"{NETWORKS}.multus"),
    mapped(
        f"{NETWORKS}.multus.networkName",
        Kind.TEXT,
        f"{TO_NETWORK}.network",
        "the nodes' CNI conflist of that name",
        pattern=r"[a-z0-9][a-z0-9-]{0,62}",
        instead="write the name of a CNI conflist of the nodes, without a namespace",
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
        Kind.TEXT,
        "",
        "each line of each of the Secret's values is a key of the seed, read at the VMI's start",
    ),
    below(f"{KEYS}.propagationMethod"),
    below(f"{KEYS}.propagationMethod.noCloud"),
    later(f"{KEYS}.propagationMethod.configDrive", "there is no config drive", "write noCloud: {}"),
    refused(f"{KEYS}.propagationMethod.qemuGuestAgent", AGENT, "write noCloud: {}"),
    refused("accessCredentials[].userPassword", AGENT, "set passwords by cloud-init"),
)

ALL = (*CONTENTS, *NETS, *CREDENTIALS)
