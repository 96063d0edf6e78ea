"""What does a collective cost, and does a ring of equal links explain it?"""
