"""What a client does in a round."""
