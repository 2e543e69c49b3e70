"""Tests of data, rules and plans; no communication, no process."""
