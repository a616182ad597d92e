"""Programs that grade a submission by unit tests inside sandboxes. Standard library only; Python 3.8 and newer.

`runner` runs the tests. `submission` runs in another sandbox, loads the submission as a module and executes
calls of the tests. Only plain data (values of built-in types) passes between them, and nothing that is received
is unpickled or evaluated.
"""
