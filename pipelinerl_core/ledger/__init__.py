"""Prompt accounting: leases, admission, order, fates."""
