"""Train a drafter for a target from nothing but the target.

``prompts`` writes user turns with the target, ``record`` answers them and keeps the states a drafter reads,
``shards`` stores both, ``losses`` and ``packing`` are the objectives, ``loop`` trains, ``card`` reports.
"""
