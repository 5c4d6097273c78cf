"""Formulas as brms, bambi and lme4 have them: read, agreed upon over the clients, and written as Pyro programs."""
