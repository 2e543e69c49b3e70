"""Tests on CUDA; plain functions with asserts, so that `python -m tests.gpu` runs them without pytest."""
