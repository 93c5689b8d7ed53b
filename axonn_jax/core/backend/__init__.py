"""XLA's backends: traits that decide what the package does on each, and repairs of the CPU backend's oddities."""
