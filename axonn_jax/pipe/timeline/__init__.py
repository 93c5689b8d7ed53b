"""Timeline of a pipelined step, measured or simulated: spans, their picture, a file for Perfetto."""
