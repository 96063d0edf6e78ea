"""One folder per question: what is asked, how it is measured, the table and the figure that show it."""
