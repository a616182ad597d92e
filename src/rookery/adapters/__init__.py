"""Adapters that let other trainers use Rookery for their rollouts.

Most modules are named after one trainer or protocol, and run in the trainer's process. They convert the rows of
`rookery.training.make_rows` to the samples of their trainer. `nemo_gym` and `verifiers` are servers, which run in
`rookery serve` and convert the segments of a rollout themselves.

A rollout that failed stays missing: none of its tokens trains, and the trainer's baseline does not count it. If a
trainer cannot express this, the module docstring of its adapter says what the adapter does instead. Packages of
other trainers are imported only where they are used.
"""
