"""Checks of a model and its data before the first round."""
