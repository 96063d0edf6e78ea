"""What does a training step of a model cost?"""
