"""The cost of a training step as pure arithmetic on configurations, without torch."""
