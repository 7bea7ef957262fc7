"""What-if replay: the recorded rollouts of a run, trained with other settings of loss and learner (docs/what-if.md)."""
