"""Any Flax model in a pipeline: its loss is traced, cut into stages, and run by the pipeline's dispatcher."""
