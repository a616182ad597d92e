"""Tasks of Inspect with a data set, solvers and scorers of its package."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, MemoryDataset, Sample, example_dataset
from inspect_ai.scorer import answer, includes, model_graded_fact
from inspect_ai.solver import generate, prompt_template, solver, system_message


@task
def popularity(count: int = 2) -> Task:
    fields = FieldSpec(input="question", target="answer_matching_behavior")
    return Task(
        dataset=MemoryDataset(list(example_dataset("popularity", fields))[:count]),
        solver=[system_message("Be brief."), prompt_template("{prompt}\nWrite ANSWER: and a word."), generate()],
        scorer=[answer("word"), includes()],
    )


@task
def graded() -> Task:
    return Task(
        dataset=MemoryDataset([Sample("1+1?", target="2", id="sum")]), scorer=model_graded_fact(), message_limit=2
    )


@solver
def broken():
    async def solve(state, generate):
        raise ValueError("boom")

    return solve


@task
def failing() -> Task:
    return Task(dataset=MemoryDataset([Sample("1+1?", target="2", id="sum")]), solver=broken(), scorer=includes())
