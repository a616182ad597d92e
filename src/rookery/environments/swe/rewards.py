"""What the grades of a task's steps make together.

Promises:
- the mean counts every step of the task, one that was not begun as the lowest reward: giving up does not pay;
- each step's reward and parts are named in the score.
"""

from rookery.scoring import Score
from rookery.tasks.swe import SweStep, SweTask


def enough(step: SweStep, grade: Score) -> bool:
    """Whether a step went well enough for the next one to begin."""
    if step.enough is not None and grade.reward < step.enough:
        return False
    return all(name in grade.parts and grade.parts[name] >= least for name, least in step.enough_parts.items())


def total(task: SweTask, grades: list[Score], low: float) -> Score:
    """The score of a rollout; a task of one step has that step's."""
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
