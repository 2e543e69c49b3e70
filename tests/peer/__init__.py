"""Tests against torch.distributed.tensor, as an oracle."""
