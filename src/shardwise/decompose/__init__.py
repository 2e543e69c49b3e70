"""Operators computed from other operators, on DTensors: where that communicates less than their rules allow."""
