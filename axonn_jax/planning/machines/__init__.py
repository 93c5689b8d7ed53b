"""Machines as the planner sees them: rates, links, and the TOML files that say them."""
