"""The experiments on the embedded task: what is run, its results as JSON, and the tables made of
them."""
