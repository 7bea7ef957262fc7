"""Sample and score the rollouts of leased groups, and continue partial rollouts."""
