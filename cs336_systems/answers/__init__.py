"""The sources of README.md, writeup.md and the pages in profiles/: committed rows, tables and numbers for prose."""
