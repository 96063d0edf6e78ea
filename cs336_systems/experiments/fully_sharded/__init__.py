"""What does full sharding buy, and what does it cost?"""
