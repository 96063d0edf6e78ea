"""Training steps under device and host capacities: layers and activations stream over the link while others compute."""
