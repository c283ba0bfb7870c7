"""What verl calls to score a sample: retrieve, maybe ask the judge, and let the recipe reward it."""
