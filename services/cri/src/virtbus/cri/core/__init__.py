"""The CRI's decisions: a pod's state, the VM of a pod, names of images, lines of logs.

Values go in and out. Messages have CRI's own field names, so no module here knows protobuf.
"""
