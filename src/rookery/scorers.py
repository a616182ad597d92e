"""Scorers: grade the final answer of a rollout. Import them from this module.

    from rookery.scorers import ExactMatch

A scorer returns a reward from 0 (wrong) to 1 (right). The environment scales it to its own range.
"""

from rookery.scoring.scorers import (
    AnswerMatch,
    CommandCheck,
    ExactMatch,
    FunctionScorer,
    JsonSchemaMatch,
    Judge,
    MathMatch,
    NoScorer,
    NumericMatch,
    RegexMatch,
    Scorer,
    Submission,
    list_scorers,
    make_scorer,
)

__all__ = [
    "AnswerMatch",
    "CommandCheck",
    "ExactMatch",
    "FunctionScorer",
    "JsonSchemaMatch",
    "Judge",
    "MathMatch",
    "NoScorer",
    "NumericMatch",
    "RegexMatch",
    "Scorer",
    "Submission",
    "list_scorers",
    "make_scorer",
]
