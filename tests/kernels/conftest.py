from tests.kernels.interpreter import interpret_without_gpu

interpret_without_gpu()
