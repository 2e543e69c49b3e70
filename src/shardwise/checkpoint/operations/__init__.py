"""Saving, loading, exporting and inspecting checkpoints, and the exchanges among processes."""
