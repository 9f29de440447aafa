"""Opens tap devices of the calling thread's namespace with `/dev/net/tun` (`linux/if_tun.h`)."""

import errno
import fcntl
import os
import struct

from virtbus.schemas.errors import Code, VirtbusError

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_IFF_MULTI_QUEUE = 0x0100


def open_tap(name: str, *, multi_queue: bool = False, header: bool = True) -> int:
    """Return a descriptor of the tap `name`, and make a missing tap.

    The caller closes the descriptor.

    Without `multi_queue` the tap has one queue, so only one process can have it open. With
    `header`, each frame has a virtio header, which lets the guest offload checksums and
    segmentation. Without `header`, the kernel computes checksums and segments before it delivers a
    frame.

    Raises:
        VirtbusError: 409 `tap_busy`: another process has the tap open, such as an earlier QEMU.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | (_IFF_MULTI_QUEUE if multi_queue else 0)
    flags |= _IFF_VNET_HDR if header else 0
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EBUSY:
            raise busy(name) from None
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def busy(name: str) -> VirtbusError:
    """Return the error 409 `tap_busy`."""
    return VirtbusError(
        Code.CONFLICT,
        "tap_busy",
        f"{name} is still held by another process; end the VM's former QEMU, start again",
    )


def make_tap(name: str, *, multi_queue: bool = False) -> None:
    """Ensure the persistent tap `name`. Raises as `open_tap`."""
    fd = open_tap(name, multi_queue=multi_queue)
    try:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)
