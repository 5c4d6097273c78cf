"""Building blocks of models and guides as pure functions: networks of a weight vector, multivariate Normals."""
