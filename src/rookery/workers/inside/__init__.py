"""The stub program of a worker: what runs inside the sandbox. Standard library only, Python 3.8 and newer.

Its modules are sent, as text, into the sandbox's own Python: there they import each other by their bare names, and
nothing else of ours.

- `monitor`, on `savepoints`, on `crew`: never runs a line of the user's; holds deadlines, ends trees, goes back;
- `live`, on `twins`, on `runs`, on `wire`: the Python that remembers, a child of the monitor, and its twin;
- `display`: values as text of bounded length;
- `kernel`: what only the system itself can do;
- `frames`: what they and the host say to each other.
"""
