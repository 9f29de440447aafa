"""Guests boot from an ISO image that was compressed, and from a disk of another hypervisor."""

import io
import json
import lzma
from pathlib import Path

import pycdlib
import pytest
from tests.e2e import host
from tests.e2e.platform import HALT, Platform, until

pytestmark = pytest.mark.e2e

_SAYS = b"BOOTED-FROM-CD\r\n\0"
_LOADER = bytes.fromhex(
    "0e1f"  # push cs; pop ds
    "e80000" "5e" "83c61f" "fc"  # call +0; pop si; add si, 31: the text; cld
    "ac" "84c0" "7412"  # lodsb; test al, al; jz end
    "88c4" "bafd03"  # mov ah, al; mov dx, COM1's line status
    "ec" "a820" "74fb"  # in al, dx; test al, 0x20; jz
    "88e0" "baf803" "ee" "ebe9"  # mov al, ah; mov dx, COM1; out dx, al; jmp lodsb
    "f4" "ebfd"  # end: hlt; jmp
)  # fmt: skip
"""A boot sector that writes the text after it to the serial port."""


def bootable_iso() -> bytes:
    """A CD-ROM with one file, that boots by El Torito."""
    iso, out = pycdlib.PyCdlib(), io.BytesIO()
    iso.new()
    sector = (_LOADER + _SAYS).ljust(2048, b"\0")
    iso.add_fp(io.BytesIO(sector), len(sector), "/BOOT.;1")
    iso.add_eltorito("/BOOT.;1", bootcatfile="/BOOT.CAT;1", boot_load_size=4)
    iso.write_fp(out)
    iso.close()
    return out.getvalue()


def test_a_guest_boots_from_an_iso_image_as_its_cdrom(platform: Platform, tmp_path: Path) -> None:
    image = platform.state_dir / "images" / "src" / "boot.iso.xz"
    image.write_bytes(lzma.compress(bootable_iso(), preset=0))
    drive = {"name": "cd", "bus": "sata", "device": "cdrom", "boot_order": 1}
    spec = {
        "domain": {"memory": {"guest": "64MiB"}, "devices": {"disks": [drive]}},
        "volumes": [{"name": "cd", "image": {"ref": f"file://{image}"}}],
    }
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"spec": spec}))
    view = platform.create("cd", "-f", str(file))
    xml = host.run("virsh", "-q", "-c", "qemu:///system", "dumpxml", f"vb-{view['uid']}")
    assert 'device="cdrom"' in xml.replace("'", '"')
    assert "<readonly/>" in xml
    until(lambda: "BOOTED-FROM-CD" in platform.console_log("cd"), "the loader's words")
    platform.delete("cd")


def test_a_guest_runs_from_a_converted_vmdk(platform: Platform) -> None:
    sources = platform.state_dir / "images" / "src"
    image = sources / "halt.vmdk"
    options = ("-o", "subformat=streamOptimized", "-O", "vmdk")
    host.run("qemu-img", "convert", "-f", "raw", *options, str(sources / HALT), str(image))
    view = platform.create("foreign", "--image", f"file://{image}")
    listed = json.loads(platform.cli("image", "list", "-o", "json"))
    stored = next(one for one in listed["items"] if f"file://{image}" in one["names"])
    assert (stored["format"], stored["digest"]) == ("qcow2", view["image_digest"])
    platform.delete("foreign")
