"""The NATS server of the bus: its configuration, accounts, permissions, streams and backup."""
