"""Training: what one optimizer step is, and what surrounds a run of them."""
