"""Results of a fit: posterior, predictions, ArviZ data, files, metrics and bounds."""
