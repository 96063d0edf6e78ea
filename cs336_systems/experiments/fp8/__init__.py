"""What do products in fp8 buy, what does quantizing cost, and how far do gradients turn?"""
