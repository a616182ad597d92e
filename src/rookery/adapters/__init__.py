"""Adapters that let other trainers use Rookery for their rollouts. Each module names one trainer.

An adapter converts the rows of `rookery.training.make_rows` to the samples of its trainer. A rollout that failed
stays missing: none of its tokens trains, and the trainer's baseline does not count it. An adapter refuses at
construction what its trainer cannot express. Packages of other trainers are imported only where they are used.
"""
