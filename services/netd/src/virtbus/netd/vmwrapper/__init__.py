"""The program that libvirt runs instead of QEMU, in C and in Python.

`edge.wrapper_install` installs one. Both share the protocol of `core.wrapper_frame` and the tests.
Must not enter: anything except fetching descriptors and exec, because every line delays a start.
"""
