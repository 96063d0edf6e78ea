"""What does a Transformer block cost, written out at each choice of what it keeps, against the compiled one?"""
