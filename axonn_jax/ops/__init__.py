"""Operations of a layer on one device: declared once by the layer, read by every cost model; no jax."""
