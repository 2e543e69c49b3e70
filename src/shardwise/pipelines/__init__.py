"""Pipelines: a model cut into stages on different ranks, run by a schedule. The public names, nothing else."""

from __future__ import annotations

from shardwise.pipelines.dry_pipeline import PipelineEstimate
from shardwise.pipelines.pipeline_picture import draw_pipeline
from shardwise.pipelines.pipeline_run import Pipeline, pipeline
from shardwise.pipelines.pipeline_tables import Action, Overlapped, pipeline_table
from shardwise.pipelines.pipeline_timeline import Timeline, timeline_of

__all__ = [
    "Action",
    "Overlapped",
    "Pipeline",
    "PipelineEstimate",
    "Timeline",
    "draw_pipeline",
    "pipeline",
    "pipeline_table",
    "timeline_of",
]
