"""Parallelism on many devices, by arithmetic: forms, meshes, rings, pipelines, scaling, failures."""
