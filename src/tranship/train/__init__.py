"""Training engines: the protocol, the table, and the implementations."""

from tranship.train.engine import TRAIN_ENGINES, LossFn, LossInputs, Totals, TrainEngine

__all__ = ["TRAIN_ENGINES", "LossFn", "LossInputs", "Totals", "TrainEngine"]
