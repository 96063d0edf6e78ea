"""What a step should cost and what it does cost, side by side: tables, figures, comparisons."""
