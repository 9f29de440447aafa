"""Reports the installation in `kubevirt` objects."""
