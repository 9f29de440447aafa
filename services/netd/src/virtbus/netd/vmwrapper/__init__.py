"""The program that libvirt runs instead of QEMU, in C and in Python.

`edge.wrapper_install` installs one version. Both versions share the protocol of
`core.wrapper_frame` and the tests. The program only fetches descriptors and runs exec, because
every further line delays a start.
"""
