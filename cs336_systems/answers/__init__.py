"""What README.md, writeup.md and the pages in profiles/ need: committed rows, tables and numbers for prose."""
