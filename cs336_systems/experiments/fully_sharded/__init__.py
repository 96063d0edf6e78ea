"""What does full sharding save, and what does it cost?"""
