"""The CRI's decisions: a pod's state, the VM of a pod, names of images, lines of logs.

These modules only compute values. Messages are plain values with CRI's field names, without
protobuf.
"""
