"""Comparisons: arms over seeds, their plan, their results and the pages about them."""
