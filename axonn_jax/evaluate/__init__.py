"""Evaluation of generated programs: ParEval's files and metrics, a small suite, and a sandbox."""
