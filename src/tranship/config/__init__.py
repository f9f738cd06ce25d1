"""The configuration and how it is loaded. Imports neither torch nor ray."""

from tranship.config.load import load
from tranship.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DataSourceConfig,
    DockConfig,
    KlConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    PlacementConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataSourceConfig",
    "DockConfig",
    "KlConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "ValidationConfig",
    "load",
]
