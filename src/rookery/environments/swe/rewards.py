"""Combine the scores of the steps of a task.

The mean counts every step of the task; a step that was not reached counts as the lowest reward, so giving up
never pays.
"""

from rookery.scoring import Score
from rookery.tasks.swe import SweStep, SweTask


def may_continue(step: SweStep, grade: Score) -> bool:
    """Return whether a step's score is high enough for the next step to begin."""
    if step.enough is not None and grade.reward < step.enough:
        return False
    return all(name in grade.parts and grade.parts[name] >= least for name, least in step.enough_parts.items())


def combine_scores(task: SweTask, grades: list[Score], low: float) -> Score:
    """Return the score of a rollout from those of its steps."""
    if len(task.steps) == 1:
        return grades[0]
    parts: dict[str, float] = {}
    rewards: list[float] = []
    for number, step in enumerate(task.steps):
        name = step.name or f"step-{number + 1}"
        grade = grades[number] if number < len(grades) else Score(low)
        rewards.append(grade.reward)
        parts[name] = grade.reward
        parts.update({f"{name}/{part}": value for part, value in grade.parts.items()})
    reward = rewards[-1] if task.rewards == "final" else sum(rewards) / len(rewards)
    return Score(reward, parts, {"steps_graded": float(len(grades))})
