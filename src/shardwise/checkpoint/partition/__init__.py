"""Which box of a tensor is on which rank, who writes it, and how fused tensors are sliced. Integer arithmetic only."""
