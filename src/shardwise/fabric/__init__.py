"""Fabrics execute steps; this is the only layer that communicates."""
