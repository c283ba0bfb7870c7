"""What verl calls to score a sample: ask what its recipe's kind asks, and let the recipe reward it."""
