"""What does measuring itself cost?"""
