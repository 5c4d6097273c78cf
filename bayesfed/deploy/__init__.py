"""A fit between machines: the clients' rows and variables stay at their sites."""
