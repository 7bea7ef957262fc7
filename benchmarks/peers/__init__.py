"""Reference trainers for `bench learning`: the same model and prompts, measured as runs of PipelineRL are.

    python -m benchmarks.peers trl --out DIR --seed 0
    python -m benchmarks.peers sequential --out DIR --seed 0
    python -m benchmarks.peers evaluate --out DIR

A reference trainer stores the weights of every k-th step and writes points.json (record.py); then `evaluate` adds the
held-out accuracy of these weights. task.py has the model, prompts and reward of the compared runs.
"""
