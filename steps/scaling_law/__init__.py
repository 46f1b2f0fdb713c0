"""Laws of the loss that are fitted to runs, and forecasts by them."""
