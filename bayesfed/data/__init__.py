"""The clients' data: federations, sources of data, and the batches that a model runs on."""
