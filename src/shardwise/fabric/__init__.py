"""Who carries out a step: the only place that communicates."""
