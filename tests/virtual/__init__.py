"""Tests on many ranks inside one process."""
