"""Ways of running one model on devices, behind one contract."""

from headway.strategies.base import DataShard, EvalStep, Strategy
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice

__all__ = ["DataShard", "EvalStep", "Objective", "SingleDevice", "Strategy"]
