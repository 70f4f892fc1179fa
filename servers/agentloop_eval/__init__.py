"""Evaluation of a served policy: samples of a task set, pass rates with confidence intervals, comparisons."""

from agentloop_eval.evaluation import Evaluation, SampleResult, TaskResult, evaluate
from agentloop_eval.figures import Comparison, Figures, Interval, compare, figures_of

__all__ = [
    "Comparison",
    "Evaluation",
    "Figures",
    "Interval",
    "SampleResult",
    "TaskResult",
    "compare",
    "evaluate",
    "figures_of",
]
