"""Measurements of `make gpu-day` (infra/gpu_day.py has the stages): each module is a part, run as a process."""
