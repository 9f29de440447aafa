"""Performs: the gRPC server and clients, protobuf messages, the files of the last answers."""
