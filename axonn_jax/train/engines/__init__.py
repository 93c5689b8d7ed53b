"""Engines that run the steps of a trainer: one SPMD program, or a pipeline of stages."""
