"""What do matrix products in fp8 gain, what does quantizing cost, and how accurate are gradients?"""
