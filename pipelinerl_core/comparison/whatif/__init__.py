"""What-if replay: the recorded rollouts of a run, trained with another loss or learner (docs/what-if.md)."""
