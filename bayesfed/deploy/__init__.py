"""A fit between machines: the clients' rows and local variables stay at their institutions."""
