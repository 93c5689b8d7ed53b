"""Checkpoints: named arrays that any grid loads, written while training goes on, complete or not there."""
