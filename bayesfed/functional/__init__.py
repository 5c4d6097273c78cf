"""Building blocks of models and guides as pure functions: networks with given weights, multivariate Normals."""
