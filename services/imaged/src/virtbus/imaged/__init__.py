"""imaged: turns an image reference into a verified local file and a VM's private disks.

Belongs here: the content-addressed store, downloads, header checks, overlays. Must not enter:
libvirt, networks, or a decision to remove a VM's disks (the nodeagent sends `release`).
"""
