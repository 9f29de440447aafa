"""What the agent does: libvirt, seeds, files, consoles. One door an outside library."""
