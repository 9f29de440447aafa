"""The agent's effects: libvirt, seeds, files, consoles. One module for each outside library."""
