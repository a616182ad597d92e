"""The number of functions between `chat()` in an environment and the socket."""

import pytest

from benchmarks.model_call import trace_call

MAX_STACK = 9
MAX_FUNCTIONS = 16
"""Limit measured by `python -m benchmarks model-call`. Lower it when the path gets shorter."""


@pytest.mark.long
def test_model_call_enters_few_functions_before_the_socket():
    path = trace_call()
    assert path.stack[0].endswith("Model.chat")
    assert len(path.stack) <= MAX_STACK, path.stack
    assert len(path.functions) <= MAX_FUNCTIONS, path.functions
