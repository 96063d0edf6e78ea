"""What does sharding the optimizer state save, and what does it cost?"""
