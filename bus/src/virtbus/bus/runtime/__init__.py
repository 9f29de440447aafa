"""The frame of a service: its process, settings, logs, tasks and sources."""
