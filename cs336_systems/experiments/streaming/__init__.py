"""What does training under caps on device and host memory cost? Simulated, and measured on a GPU."""
