"""Agent programs as environments: a program per episode, which speaks chat completions with a local endpoint."""
