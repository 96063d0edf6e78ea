"""When does communication outlast computation? Answered by arithmetic."""
