"""What is summed over a cohort, and what the server does with the sum."""
