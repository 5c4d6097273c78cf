"""A Pyro program written for one client and one draw, run for all clients and draws of a batch."""
