"""Engines: what runs the steps of a trainer, as one SPMD program or as a pipeline of stages."""
