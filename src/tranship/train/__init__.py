"""Training engines: the protocol, the table, and the implementations."""

from tranship.train.engine import (
    CRITIC_ENGINES,
    TRAIN_ENGINES,
    CriticEngine,
    LossFn,
    LossInputs,
    LossNeeds,
    Totals,
    TrainEngine,
    ValueInputs,
    ValueLossFn,
    loss_needs,
)

__all__ = [
    "CRITIC_ENGINES",
    "TRAIN_ENGINES",
    "CriticEngine",
    "LossFn",
    "LossInputs",
    "LossNeeds",
    "Totals",
    "TrainEngine",
    "ValueInputs",
    "ValueLossFn",
    "loss_needs",
]
