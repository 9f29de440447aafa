"""The controller's effects: records on the bus, and requests from it."""
