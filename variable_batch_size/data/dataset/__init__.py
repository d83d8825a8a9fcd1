"""What is known of a dataset: its rows, and the random numbers that it draws for them."""
