"""Virtlet's example manifests, as requests to the runtime, by the names of their files.

The texts are ours. An example that needs a volume has the kind of it; kubelet gives the runtime a
path of the node for each.
"""

from typing import NamedTuple

TARGET = {"kubernetes.io/target-runtime": "virtlet.cloud"}
VIRTIO = {"VirtletDiskDriver": "virtio"}
KEY = {"VirtletSSHKeys": "KEY\n"}
"""`KEY` stands for a public key of the test."""
ONE_CPU = {"VirtletVCPUCount": "1"}
USER = {
    "VirtletCloudInitUserData": (
        "ssh_pwauth: True\n"
        "users:\n"
        "- name: testuser\n"
        "  lock_passwd: false\n"
        "  plain_text_passwd: testuser\n"
        "  shell: /bin/bash\n"
        "  sudo: ALL=(ALL) NOPASSWD:ALL\n"
    )
}
MOUNT = {"VirtletCloudInitUserData": 'mounts:\n- ["/dev/testpvc", "/mnt"]\n'}
CPU = "mode: custom\nmodel:\n  value: Westmere\nfeatures:\n- name: avx\n  policy: disable\n"
PROVISION = (
    "write_files:\n- path: /usr/local/bin/provision.sh\n  permissions: '0755'\n  owner: root\n"
    "  content: |\n    #!/bin/sh\n    echo provisioned\n"
    "users:\n- name: root\n  ssh-authorized-keys:\n  - KEY\n"
    "runcmd:\n- /usr/local/bin/provision.sh\n"
)
ROOT, DEVICE, QCOW2, FOLDER, UNMOUNTED, RBD = (
    "root",
    "device",
    "qcow2",
    "folder",
    "unmounted",
    "rbd",
)


class Example(NamedTuple):
    """An example: its annotations without the target, its memory limit and its volume's kind."""

    annotations: dict[str, str]
    memory_mib: int = 0
    volume: str = ""


EXAMPLES = {
    "cirros-vm": Example({**VIRTIO, **KEY, "VirtletRootVolumeSize": "1Gi"}, 160),
    "cirros-vm-deployment": Example({**VIRTIO, **KEY, **ONE_CPU}, 160),
    "cirros-vm-persistent-rootfs-local": Example({**VIRTIO, **KEY}, volume=ROOT),
    "cirros-vm-persistent-rootfs-rbd": Example({**VIRTIO, **KEY}, volume=RBD),
    "cirros-vm-raw-device": Example({}, volume=UNMOUNTED),
    "cirros-vm-volume-mount": Example(
        {
            **VIRTIO,
            **KEY,
            **ONE_CPU,
            "VirtletCloudInitUserDataScript": "@virtlet-mount-script@",
        },
        160,
        QCOW2,
    ),
    "cirros-vm-with-additional-annotations": Example(
        {**VIRTIO, **KEY, **ONE_CPU, "VirtletCloudInitUserDataScript": "#!/bin/sh\necho here\n"},
        160,
    ),
    "debian-vm": Example(
        {**KEY, "VirtletRootVolumeSize": "4Gi", "VirtletForceDHCPNetworkConfig": "true"}
    ),
    "fedora-vm": Example(KEY, 256),
    "fedora-vm-with-testuser": Example({**USER, **KEY}, 256),
    "k8s": Example(
        {
            "VirtletRootVolumeSize": "4Gi",
            "VirtletVCPUCount": "2",
            "VirtletCloudInitUserData": PROVISION,
        }
    ),
    "ubuntu-multi-cni": Example({**USER, "cni": "calico,flannel"}),
    "ubuntu-vm": Example({**KEY, "VirtletRootVolumeSize": "4Gi"}),
    "ubuntu-vm-hostpath-pv": Example(KEY, volume=FOLDER),
    "ubuntu-vm-local-block-pv": Example({**KEY, **MOUNT}, volume=DEVICE),
    "ubuntu-vm-nfs-pv": Example(KEY, volume=FOLDER),
    "ubuntu-vm-rbd-block-pv": Example({**KEY, **MOUNT}, volume=RBD),
    "ubuntu-vm-with-libvirt-cpusetting": Example(
        {**KEY, "VirtletCPUModel": "host-model", "VirtletLibvirtCPUSetting": CPU}
    ),
    "ubuntu-vm-with-nested-virtualization": Example({**KEY, "VirtletCPUModel": "host-model"}),
    "ubuntu-vm-with-testuser": Example({**USER, **KEY}),
    "ubuntu-vm-with-volume": Example(KEY, volume=QCOW2),
}
NOT_OF_KUBELET = frozenset({RBD})
"""Kinds of volumes that kubelet itself has no more (Kubernetes 1.31)."""


def annotations(example: Example, key: str) -> dict[str, str]:
    """Return all annotations, with a public key in place of `KEY`."""
    whole = {**TARGET, **example.annotations}
    return {name: text.replace("KEY", key) for name, text in whole.items()}
