"""What does each step of data parallelism buy?"""
