"""Run of training: its configuration, its loop, what it saves and what it tells of itself."""
