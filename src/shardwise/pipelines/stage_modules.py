"""The stages of a pipeline in this process as one module, whose parameters have the names of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.checkpoint.operations.save_checkpoint import STAGE

__all__ = ["StageModules"]


class StageModules(nn.Module):
    """A container of stages, for functions that take a model: of state dicts, `train` and `eval`.

    Args:
        stages: the stages of this process by number.
        in_one: the stages are parts of one `nn.Sequential`: names omit the stage, as in that model.

    Example:
        >>> from shardwise.checkpoint.state_dict import get_model_state_dict
        >>> stage = nn.Sequential()
        >>> stage.add_module("2", nn.Linear(2, 2))
        >>> list(get_model_state_dict(StageModules({1: stage}, in_one=True)))
        ['2.weight', '2.bias']
        >>> list(get_model_state_dict(StageModules({1: stage}, in_one=False)))
        ['1.2.weight', '1.2.bias']
    """

    def __init__(self, stages: Mapping[int, nn.Module], *, in_one: bool) -> None:
        super().__init__()
        self._in_one = in_one
        self._omitted: dict[str, str] = {}
        self.follow(stages)

    def follow(self, stages: Mapping[int, nn.Module]) -> None:
        """Contain these stages instead; their parameters learn their stage."""
        named = {f"stage{number}" if self._in_one else str(number): stage for number, stage in stages.items()}
        if named == self._modules:
            return
        self._modules.clear()
        for name, stage in named.items():
            self.add_module(name, stage)
        self._omitted = {name: name for name in named} if self._in_one else {}
        for number, stage in stages.items():
            for parameter in stage.parameters():
                setattr(parameter, STAGE, f"stage {number}")

    def forward(self, *_: Any) -> Any:
        """Not available: stages run by their schedule."""
        raise NotImplementedError("a pipeline runs by pipe.step, not by calling its modules")

    def _fqn_modifiers(self) -> dict[str, str]:
        """The children whose names state dicts omit."""
        return self._omitted
