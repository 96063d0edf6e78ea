"""What a training step should cost: pure arithmetic on configurations, without torch."""
