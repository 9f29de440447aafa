"""The CRI's effects: the gRPC server, the files of the node, the bus, the logs of containers."""
