"""The cost of training on many devices, without running it: forms, meshes, pipelines, scaling, failures."""
