"""Tensor parallel plans: `parallelize_module`, the styles, and how a layer of a style runs."""
