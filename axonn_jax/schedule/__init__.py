"""Schedule of a pipeline rank: its tasks, their orders, and a dispatcher that says what is next; pure Python."""
