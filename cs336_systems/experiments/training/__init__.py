"""How fast does a run train?"""
