"""The agent's decisions and documents: values in, values out. No await, clock, file or libvirt."""
