"""Tables, figures and comparisons that put what a step should cost beside what it does cost."""
