"""Schedule of a pipeline rank: tasks, their orders, and a dispatcher that picks the next task; pure Python."""
