"""What is checked of a model and its data before the first round."""
