"""Which attention for these shapes?"""
