"""What the controller decides: values in, values out. No await, clock, socket or randomness."""
