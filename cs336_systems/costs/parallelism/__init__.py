"""Parallelism on many devices, by arithmetic: forms, meshes, pipelines, scaling, failures."""
