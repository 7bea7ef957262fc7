"""Other ways to train the same model on the same prompts, measured as our runs are, for `bench learning`.

    python -m pipelinerl_core.bench.peers trl --out DIR --seed 0
    python -m pipelinerl_core.bench.peers sequential --out DIR --seed 0
    python -m pipelinerl_core.bench.peers evaluate --out DIR

A peer trains, keeps the weights of every k-th step and writes points.json (record.py); `evaluate` adds their held-out
accuracy afterwards. What peers share with our runs is in task.py.
"""
