"""What libvirt runs instead of QEMU, in C and in Python; `edge.wrapper_install` installs one.

Both are the same program: they share the protocol of `core.wrapper_frame` and the tests. Must not
enter: anything but fetching descriptors and exec; a start waits on every line here.
"""
