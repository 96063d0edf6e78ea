"""What does each form of data parallelism gain?"""
