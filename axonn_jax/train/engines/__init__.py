"""Engines that run a trainer's steps: one SPMD program, or a pipeline of stages."""
