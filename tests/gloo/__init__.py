"""Tests on real processes of one machine."""
