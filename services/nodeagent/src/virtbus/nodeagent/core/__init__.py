"""What the agent decides and renders: values in, values out. No await, clock, file or libvirt."""
