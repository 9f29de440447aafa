"""The controller's decisions: values in, values out. No await, clock, socket or randomness."""
