"""Where do abstractions leak? Four experiments that predict, then measure."""
