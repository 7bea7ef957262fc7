"""Models by their path: files, recipes, shapes, data type and learning rate.

Nothing here imports torch or transformers, so that flows and commands start fast.
"""
