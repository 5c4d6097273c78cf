"""When a run ends: after a number of rounds, on convergence, or by held-out rows."""
