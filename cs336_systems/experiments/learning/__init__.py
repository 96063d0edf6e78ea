"""What does a run learn, and how fast, when blocks multiply in fp8?"""
