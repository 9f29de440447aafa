"""Reconciles VirtualMachineInstances, and VMs of the bus without one."""
