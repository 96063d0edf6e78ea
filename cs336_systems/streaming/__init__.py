"""Training steps within device and host memory limits: layers and activations are copied while others compute."""
