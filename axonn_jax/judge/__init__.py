"""Evaluation on ParEval's terms: its files and metrics, a small suite, and a sandbox for generated programs."""
