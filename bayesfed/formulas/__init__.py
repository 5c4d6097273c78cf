"""Formulas in the notation of brms, bambi and lme4, parsed, coded consistently by all clients, and written in Pyro."""
