"""What rounding does to a long sum, and what autocast does to every dtype of a model."""
