"""Stopping rules, which end a run: after a number of rounds, on convergence, or by held-out rows."""
