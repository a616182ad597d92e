"""Programs that a grader runs inside sandboxes. Standard library only; Python 3.8 and newer.

`runner` runs the tests, `submission` holds the graded module in another sandbox. Only plain data passes between
them, and nothing that comes in is unpickled or evaluated.
"""
