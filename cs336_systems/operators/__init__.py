"""How Triton and Gluon kernels join torch: operators registered, kernels launched."""
